"""The engine process: its worker, the server's client, and the messages between them."""
