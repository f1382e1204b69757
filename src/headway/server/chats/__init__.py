"""Chats, whatever API they come from.

messages         messages and tools for the model's template; the tokens of the prompt
fields           other spellings of the same request: functions, allowed tools, template variables
plan             a checked chat: its prompt, its tool policy, how long its message may become
message_stream   one message of an assistant, as it is generated
format_or_call   the constraint of a message that either calls a tool or follows a format
message_job      one message as a response, in the format of any API
"""
