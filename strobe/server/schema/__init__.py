"""Request models: their base, and the objects that several APIs share."""
