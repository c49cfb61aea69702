"""Programs around the engine, which never imports them: bench, eval, doctor, train."""
