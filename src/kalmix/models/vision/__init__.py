"""Vision models made of the library's layers."""
