//! Turns of a chat: asking, and printing what comes.

use std::io::{BufRead, IsTerminal, Write};
use std::time::Instant;

use hearthnet_model::ChatMessage;
use hearthnet_orchestrator::chat::{ChatRequest, Conversation, Done, Frame, Prompt, TextModel};
use hearthnet_orchestrator::{Cancel, ChatError};

use super::{Chat, Own};
use crate::args::ChatArgs;
use crate::commands::{print_bytes, print_json, sampling};
use crate::explain::{explain, waiting};
use crate::failure::{Failure, Kind};
use crate::output::note;
use crate::service_chat::{self, Unanswered};

impl Chat<'_> {
    /// Answers one turn and prints it in the form that was asked for.
    pub(super) fn turn(&mut self, prompt: Prompt, started: Instant) -> Result<Done, Failure> {
        let args = self.args;
        let request = ChatRequest {
            prompt,
            sampling: sampling(&args.sampling)?,
            max_tokens: args.sampling.max_tokens,
            stop: args.sampling.stop.clone(),
        };
        let print: Print = match (args.json, args.frames) {
            (true, _) => |_| Ok(()),
            (_, true) => print_frame,
            _ => print_text,
        };
        let mut moves = Vec::new();
        let mut watched = |frame: &Frame| {
            if let Frame::ShardFailover { host, .. } = frame {
                if host.is_none() && !args.json && !args.frames {
                    note("no host can be had for this: this machine answers alone");
                }
                moves.push(frame.clone());
            }
            if let Some(line) = waiting(frame)
                && !args.json
                && !args.frames
            {
                note(line);
            }
            print(frame)
        };
        let done = self.answer(&request, started, &mut watched)?;
        if args.json {
            print_json(&done)?;
        } else if !args.frames {
            print_bytes(b"\n")?;
        }
        if args.explain {
            note(explain(&done, &moves));
        }
        Ok(done)
    }

    /// Asks the service, if there is one, and answers in this process if there is none or it goes
    /// away: what it has said is not said again.
    fn answer(
        &mut self,
        request: &ChatRequest,
        started: Instant,
        print: &mut dyn FnMut(&Frame) -> Result<(), Failure>,
    ) -> Result<Done, Failure> {
        let mut said = 0;
        if let Some((service, model)) = &self.service {
            let (runtime, cancel) = (self.runtime.handle(), &self.cancel);
            let answer = printing(print, cancel, |emit| {
                service_chat::answer(runtime, service, &model.id, request, cancel, emit)
            })?;
            match answer {
                Ok(done) => return Ok(done),
                Err(Unanswered::Failed(failure)) => return Err(failure),
                Err(Unanswered::Gone(tokens)) => said = tokens,
            }
            // What it has begun, only the same model can finish.
            self.begun = self.service.take().map(|(_, model)| model);
            if !self.args.json {
                note("going on without the service on this machine");
            }
        }
        let mut own = match self.own.take() {
            Some(own) => own,
            None => self.open()?,
        };
        let mut print_rest = |frame: &Frame| match frame {
            Frame::TokenDelta { .. } if said > 0 => {
                said -= 1;
                Ok(())
            }
            frame => print(frame),
        };
        let Own {
            conversation, text, ..
        } = &mut own;
        let done = stream_answer(
            conversation,
            text,
            request,
            started,
            &self.cancel,
            &mut print_rest,
        );
        self.own = Some(own);
        done
    }

    pub(super) fn interactive(&mut self) -> Result<(), Failure> {
        if self.args.raw {
            return Err(
                Failure::new(Kind::Config, "--raw needs a prompt on the command line")
                    .hint("an interactive chat uses the model's chat template"),
            );
        }
        let stdin = std::io::stdin();
        let terminal = stdin.is_terminal();
        if terminal {
            note(
                "Write a message and press Enter; Ctrl-D ends the chat, Ctrl-C twice ends it at once.",
            );
        }
        let mut messages = system(self.args);
        let mut line = String::new();
        loop {
            if terminal {
                let _ = write!(std::io::stderr(), "> ");
            }
            line.clear();
            let read = stdin.lock().read_line(&mut line).map_err(|e| {
                Failure::new(Kind::BadRequest, format!("cannot read the message: {e}"))
                    .hint("messages must be UTF-8 text")
            })?;
            if read == 0 {
                return Ok(());
            }
            if self.cancel.is_cancelled() {
                return Err(ChatError::Cancelled.into());
            }
            let message = line.trim();
            if message.is_empty() {
                continue;
            }
            messages.push(ChatMessage::user(message));
            let prompt = Prompt::Messages(messages.clone());
            let done = self.turn(prompt, Instant::now())?;
            messages.push(ChatMessage::assistant(done.text));
        }
    }
}

/// How a frame reaches standard output.
pub(crate) type Print = fn(&Frame) -> Result<(), Failure>;

/// Answers and prints frames as they come. A reader that goes away cancels the answer.
pub(crate) fn stream_answer(
    conversation: &mut Conversation,
    text: &TextModel,
    request: &ChatRequest,
    started: Instant,
    cancel: &Cancel,
    print: &mut dyn FnMut(&Frame) -> Result<(), Failure>,
) -> Result<Done, Failure> {
    let answer = printing(print, cancel, |emit| {
        conversation.answer(text, request, started, cancel, emit)
    })?;
    Ok(answer?)
}

/// Runs something that emits frames, which are printed. It is cancelled when that fails.
fn printing<T>(
    print: &mut dyn FnMut(&Frame) -> Result<(), Failure>,
    cancel: &Cancel,
    run: impl FnOnce(&mut dyn FnMut(&Frame)) -> T,
) -> Result<T, Failure> {
    let mut failed = None;
    let result = run(&mut |frame| {
        if failed.is_none()
            && let Err(failure) = print(frame)
        {
            failed = Some(failure);
            cancel.cancel();
        }
    });
    match failed {
        Some(failure) => Err(failure),
        None => Ok(result),
    }
}

/// Prints a frame as a line of JSON.
fn print_frame(frame: &Frame) -> Result<(), Failure> {
    print_json(frame)
}

/// Prints the text of `token_delta` frames.
pub(crate) fn print_text(frame: &Frame) -> Result<(), Failure> {
    match frame {
        Frame::TokenDelta { text, .. } if !text.is_empty() => print_bytes(text.as_bytes()),
        _ => Ok(()),
    }
}

pub(super) fn system(args: &ChatArgs) -> Vec<ChatMessage> {
    args.system.iter().map(ChatMessage::system).collect()
}
