"""The machine that Strobe runs on: its memory, threads and files, and copies to a device."""
