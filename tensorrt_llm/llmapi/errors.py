"""What a caller of the LLM API can get wrong."""


class RequestError(ValueError):
    """A request that cannot be served; its text names the field, its value and the limit."""
