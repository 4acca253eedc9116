//! The program at its terminal: arguments, input, output, errors and signals.

pub(crate) mod args;
pub(crate) mod failure;
pub(crate) mod output;
pub(crate) mod qr;
pub(crate) mod runtime;
pub(crate) mod secret;
pub(crate) mod signals;
pub(crate) mod wrap;

pub(crate) use self::failure::{Failure, Kind, failure, no_thread};
pub(crate) use self::output::{
    Progress, Sanitized, Spinner, Styled, TerminalStyle, answer, ask, bytes, columns, confirm,
    counted, escaped, first_digits, note, print, print_bytes, print_json, print_result, report,
    span, table, when,
};
pub(crate) use self::runtime::{block_on, blocking, runtime};
pub(crate) use self::signals::{Stop, cancel_on_interrupt, watch_interrupt};
