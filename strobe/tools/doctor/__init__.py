"""`strobe doctor`: check whether a target and a drafter fit, and if not, say why."""
