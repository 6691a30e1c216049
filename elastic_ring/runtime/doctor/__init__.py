"""`elastic-ring doctor`: reports of a cluster's hosts before a run starts, and the verdicts on them."""
