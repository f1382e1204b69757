"""The flags of commands: how one declares them, those that several share, and plain command lines without typer."""
