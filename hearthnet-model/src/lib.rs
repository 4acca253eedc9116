//! Model files, text and the exact engine: everything that turns files into numbers.
