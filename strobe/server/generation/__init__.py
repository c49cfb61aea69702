"""Generation of answers, for all APIs."""
