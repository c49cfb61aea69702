"""`strobe verify`: whether speculation, or another engine, gives the target's own output."""
