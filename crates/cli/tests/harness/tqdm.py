class tqdm:
    def __init__(self, **options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def update(self, count):
        pass
