"""`elastic-ring doctor`: what a cluster's hosts report, and what follows from it before a run starts."""
