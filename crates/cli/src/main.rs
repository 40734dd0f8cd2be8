//! The `lmx` command line.

fn main() {}
