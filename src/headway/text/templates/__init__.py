"""Chat templates: messages → prompt text (`chat_template`), rendered in a metered sandbox (`sandbox`, `meter`)."""
