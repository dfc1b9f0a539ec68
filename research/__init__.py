"""ExoGym's own studies: an atlas of all methods, claims of papers, a benchmark, and a judge of `exogym advise`.

`python -m research --help` lists the commands. Nothing here is installed with the package. `research/README.md` says
what each study asks, and links its results.
"""
