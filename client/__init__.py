"""The client side: `AutoDistributedModel` and what runs below it."""
