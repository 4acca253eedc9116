//! The `hearthnet` program.
fn main() {}
