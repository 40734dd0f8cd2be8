import fnmatch


class TaskManager:
    def __init__(self, include_path):
        self.known = ["requests"] + (["included"] if include_path else [])

    def match_tasks(self, patterns):
        return [task for task in self.known if any(fnmatch.fnmatch(task, pattern) for pattern in patterns)]
