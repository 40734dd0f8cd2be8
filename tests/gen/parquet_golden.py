#!/usr/bin/env python3
"""The same records as tests/golden/eval/*.jsonl in parquet files, as the datasets package writes them.

    python tests/gen/parquet_golden.py --out tests/golden/eval

Needs pyarrow (26.0.1 was used) beside requirements.txt. Each table has row groups of two rows, so that reading one has to
look for it, and columns that a record does not need.
"""

import argparse
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

TEXTS = ["One river runs to the sea.", "", "Two boats, three oars.", "Élan vital: ça va?", "The last line of all."]
CHATS = [
    [{"role": "user", "content": "Is it far?"}, {"role": "assistant", "content": "No."}],
    [{"role": "user", "content": "And now?"}, {"role": "assistant", "content": "Still not."}],
    [{"role": "user", "content": "Then go on."}, {"role": "assistant", "content": "I do."}],
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    tables = {
        "texts": [{"id": i, "text": text} for i, text in enumerate(TEXTS)],
        "chats": [{"id": i, "messages": messages} for i, messages in enumerate(CHATS)],
    }
    for name, records in tables.items():
        lines = [json.dumps(record, ensure_ascii=False) for record in records]
        (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        pq.write_table(pa.Table.from_pylist(records), out / f"{name}.parquet", row_group_size=2, compression="snappy")
    pq.write_table(pa.Table.from_pylist(tables["texts"]), out / "texts-zstd.parquet", compression="zstd")


if __name__ == "__main__":
    main()
