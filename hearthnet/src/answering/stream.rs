//! Prints an answer as it arrives.

use std::io::IsTerminal as _;
use std::time::Instant;

use hearthnet_orchestrator::Cancel;
use hearthnet_orchestrator::chat::{ChatRequest, Conversation, Done, Frame, TextModel};

use crate::cli::{Failure, print, print_bytes};

/// Prints a frame to standard output.
pub(crate) type Print = fn(&Frame) -> Result<(), Failure>;

/// Answers and prints frames as they arrive. If standard output is closed, the answer is cancelled.
pub(crate) fn stream_answer(
    conversation: &mut Conversation,
    text: &TextModel,
    request: &ChatRequest,
    started: Instant,
    cancel: &Cancel,
    print: &mut dyn FnMut(&Frame) -> Result<(), Failure>,
) -> Result<Done, Failure> {
    let mut printer = Printer::new(cancel);
    let mut emit = |frame: &Frame| printer.run(|| print(frame));
    let answer = conversation.answer(text, request, started, cancel, &mut emit);
    Ok(printer.end(answer)??)
}

/// Printing of an answer in progress. If printing fails, cancels the answer.
pub(crate) struct Printer<'a> {
    cancel: &'a Cancel,
    failed: Option<Failure>,
}

impl<'a> Printer<'a> {
    pub(crate) fn new(cancel: &'a Cancel) -> Self {
        Self {
            cancel,
            failed: None,
        }
    }

    /// Prints, unless that has failed before.
    pub(crate) fn run(&mut self, print: impl FnOnce() -> Result<(), Failure>) {
        if self.failed.is_none()
            && let Err(failure) = print()
        {
            self.failed = Some(failure);
            self.cancel.cancel();
        }
    }

    /// Returns the answer, or the error of printing.
    pub(crate) fn end<T>(self, answer: T) -> Result<T, Failure> {
        match self.failed {
            Some(failure) => Err(failure),
            None => Ok(answer),
        }
    }
}

/// Prints the text of `token_delta` frames: sanitized on a terminal, else unchanged.
pub(crate) fn print_text(frame: &Frame) -> Result<(), Failure> {
    match frame {
        Frame::TokenDelta { text, .. } if text.is_empty() => Ok(()),
        Frame::TokenDelta { text, .. } if std::io::stdout().is_terminal() => print(text),
        Frame::TokenDelta { text, .. } => print_bytes(text),
        _ => Ok(()),
    }
}
