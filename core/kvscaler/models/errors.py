"""Errors about models: what is not known is refused by name, never guessed."""


class ModelNotUnderstood(ValueError):
    """The architecture can't be computed with: the message names the fields and the way out."""


class UnknownModel(LookupError):
    """No facts about the model are known yet; a replica may still read them from its files."""
