"""Drafting several tokens with the model's own MTP layer and verifying them in one step."""
