"""`strobe doctor`: whether a target and a drafter fit, and where they do not, why."""
