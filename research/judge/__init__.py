"""How good the advice of `exogym advise` is, judged on the trainings of a table."""
