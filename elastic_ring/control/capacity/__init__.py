"""How many workers a run wants: demand, growth, shrinking, notices."""
