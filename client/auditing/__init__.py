"""Audits: a share of a client's sessions is computed anew on other servers, and wrong ones are found."""
