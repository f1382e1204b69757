"""From a request's body to its response: what every API of the server is made of.

parsing          request bodies as JSON
request_schema   the fields of a request and their types
checks           values against the model and the server's limits
token_bounds     allowed_token_ids and bad_words as a constraint
plan             a checked request: sampler, stops, constraint, log-probabilities
prompts          prompts of completions
tokens           tokens and log-probabilities in OpenAI's format
streaming        work that runs concurrently with its response; server-sent events
respond          admission, whole responses and streams
response_schema  the fields of responses, for the OpenAPI document
"""
