class Hook:
    def add_partial(self, what, arguments, answer):
        pass


class LM:
    def __init__(self):
        self.cache_hook = Hook()
