//! Attacks that HearthNet must hold against, one file each, with a harness and a report.
