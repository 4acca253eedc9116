//! The program at its terminal: arguments, input, output, errors and signals.

pub(crate) mod args;
pub(crate) mod failure;
pub(crate) mod output;
pub(crate) mod runtime;
pub(crate) mod secret;
pub(crate) mod signals;
pub(crate) mod wrap;
