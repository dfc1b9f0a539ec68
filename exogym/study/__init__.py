"""Many runs: methods compared, options swept, claims of papers and advice, and the folders they leave."""
