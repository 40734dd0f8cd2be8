handle_non_serializable = str


def make_table(results, column="results"):
    return f"|table of {' '.join(results[column])}|"
