//! One answer: asking for it, and showing it as it comes.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use hearthnet_model::sampler::SamplingChoice;
use hearthnet_orchestrator::chat::{
    ChatRequest, Conversation, Done, FinishReason, Frame, Prompt, TextModel, check,
};
use hearthnet_orchestrator::{Cancel, ChatError, bus};

use super::screen::Screen;
use super::{Chat, Own};
use crate::explain::explain;
use crate::failure::Failure;
use crate::local_api::Process;
use crate::output::{note, print, print_bytes, print_json};

/// What became of a turn.
pub(super) struct Turn {
    /// What has been said, also where the answer was stopped.
    pub(super) said: String,
    /// The end of the answer, or why it has none.
    pub(super) end: Result<Done, Failure>,
    /// Layers that went from one host to others meanwhile.
    pub(super) moves: Vec<Frame>,
}

impl Chat<'_> {
    /// Answers one turn, and prints it in the form that was asked for. Ctrl-C stops it.
    pub(super) fn turn(&mut self, prompt: Prompt, started: Instant) -> Turn {
        let mut turn = Turn {
            said: String::new(),
            end: Err(Failure::internal("nobody was asked")),
            moves: Vec::new(),
        };
        let interrupts = std::sync::Arc::clone(&self.interrupts);
        let answering = interrupts.answering();
        self.cancel = answering.cancel.clone();
        let mut screen = Screen::new(self.look);
        let end = self.show(prompt, started, &mut screen, &mut turn);
        // Where an answer was stopped, what is there of it stays.
        let ended = match (self.args.json, self.args.frames) {
            (false, false) => screen.end(),
            _ => Ok(()),
        };
        turn.end = end.and_then(|done| ended.map(|()| done));
        if let Ok(done) = &turn.end {
            self.comment(done, &turn.moves);
        }
        turn
    }

    fn show(
        &mut self,
        prompt: Prompt,
        started: Instant,
        screen: &mut Screen,
        turn: &mut Turn,
    ) -> Result<Done, Failure> {
        let args = self.args;
        let own = match (&self.service, &self.own) {
            (Some(service), _) => service.sampling,
            (None, Some(own)) => own.model.text.sampling,
            // The last answer has taken the service with it.
            (None, None) => {
                self.own = Some(self.open()?);
                let own = self.own.as_ref();
                own.map_or(SamplingChoice::GREEDY, |own| own.model.text.sampling)
            }
        };
        let request = ChatRequest {
            prompt,
            sampling: self.sampling.over(&own)?,
            max_tokens: self.sampling.max_tokens,
            stop: self.sampling.stop.clone(),
            exact: args.exact,
        };
        let names = self.names();
        let Turn { said, moves, .. } = turn;
        let mut told: Tell<'_> = match (args.json, args.frames) {
            (true, _) => Box::new(|event| {
                if let Event::Silent(said) = event {
                    note(*said);
                }
                Ok(())
            }),
            (_, true) => Box::new(|event| match event {
                Event::Frame(frame) => print_json(frame),
                Event::Silent(said) => {
                    note(*said);
                    Ok(())
                }
                Event::Alone => {
                    note(ALONE);
                    Ok(())
                }
            }),
            _ => Box::new(|event| match event {
                Event::Frame(frame) => screen.frame(frame, &names),
                Event::Silent(said) => screen.notice(&format!("[{said}]")),
                Event::Alone => screen.notice(&format!("[{ALONE}]")),
            }),
        };
        let mut watched = |event: Event<'_>| {
            match event {
                Event::Frame(Frame::TokenDelta { text, .. }) => said.push_str(text),
                Event::Frame(frame @ Frame::ShardFailover { .. }) => moves.push(frame.clone()),
                _ => {}
            }
            told(&event)
        };
        let done = self.answer(&request, started, &mut watched)?;
        drop(told);
        if args.json {
            print_json(&done)?;
        } else if !args.frames && !std::io::stdout().is_terminal() {
            print("\n")?;
        }
        Ok(done)
    }

    /// What is said about an answer behind it.
    fn comment(&self, done: &Done, moves: &[Frame]) {
        if self.explain {
            note(explain(done, moves));
        }
        let cut = done.finish_reason == FinishReason::Length;
        if cut && !self.args.json && !self.args.frames {
            let more = match self.interactive {
                true => ("`/set max_tokens N`", "`/reset` begins anew"),
                false => ("`--max-tokens N`", "a shorter question leaves more"),
            };
            note(self.look.dim(&match self.sampling.max_tokens {
                Some(most) if done.usage.completion_tokens >= most => format!(
                    "[stopped at the limit of {most} tokens; {} allows others]",
                    more.0
                ),
                _ => format!(
                    "[stopped: question and answer fill the {} tokens that the model reads; {}]",
                    done.usage.total_tokens.saturating_sub(1),
                    more.1
                ),
            }));
        }
    }

    /// Asks the service, if there is one, and answers in this process if there is none or it goes
    /// away: what it has said is not said again.
    fn answer(
        &mut self,
        request: &ChatRequest,
        started: Instant,
        told: &mut dyn FnMut(Event<'_>) -> Result<(), Failure>,
    ) -> Result<Done, Failure> {
        let mut said = 0;
        if let Some(asked) = &self.service {
            let (runtime, cancel) = (self.runtime.handle(), &self.cancel);
            let inference = &self.cx.config.research.distributed_inference;
            let stall = Duration::from_secs_f64(inference.shard_health_timeout_seconds);
            let answer = printing(told, cancel, |emit| {
                let (client, model) = (&asked.client, &asked.model.id);
                let mut tell = |news: bus::News<'_>| match news {
                    bus::News::Frame(frame) => emit(Event::Frame(frame)),
                    bus::News::Silent => {
                        let process = Process::of(&asked.dir);
                        let said = format!(
                            "the service on this machine, {process}, does not answer; it is waited \
                             for, up to {} s",
                            stall.as_secs()
                        );
                        emit(Event::Silent(&said));
                    }
                    _ => {}
                };
                bus::answer(runtime, client, model, request, cancel, stall, &mut tell)
            })?;
            match answer {
                Ok(done) => return Ok(done),
                // Others are about the call, or about a service that is about to stop: this process
                // may do better.
                Err(bus::Unanswered {
                    heard,
                    arithmetic,
                    error,
                    ..
                }) => match error.and_then(|error| Failure::of_answer(&error, cancel)) {
                    Some(failure) => return Err(failure),
                    None if heard > 0 && !arithmetic.is_exact() => {
                        return Err(ChatError::ArithmeticMismatch(format!(
                            "the service on this machine went away, and nobody can go on with an \
                             answer that was begun with {arithmetic}"
                        ))
                        .into());
                    }
                    None => said = heard,
                },
            }
            // What it has begun, only the same model can finish.
            self.begun = self.service.take().map(|asked| asked.model);
            told(Event::Alone)?;
        }
        self.goes_on = said > 0;
        let own = match self.own.take() {
            Some(own) => Ok(own),
            None => self.open(),
        };
        self.goes_on = false;
        let mut own = own?;
        let mut print_rest = |frame: &Frame| match frame {
            Frame::TokenDelta { .. } if said > 0 => {
                said -= 1;
                Ok(())
            }
            frame => told(Event::Frame(frame)),
        };
        let done = self.answer_here(&mut own, request, started, &mut print_rest);
        self.own = Some(own);
        done
    }

    fn answer_here(
        &self,
        own: &mut Own,
        request: &ChatRequest,
        started: Instant,
        print: &mut dyn FnMut(&Frame) -> Result<(), Failure>,
    ) -> Result<Done, Failure> {
        // What makes no sense costs nobody a conversation.
        check(&own.model.text, request)?;
        // One that has gone on without its hosts goes back to them with the next question.
        let kept = own.conversation.take().filter(Conversation::is_alive);
        let mut conversation = match kept {
            Some(conversation) => conversation,
            None => self.conversation(own)?,
        };
        let done = stream_answer(
            &mut conversation,
            &own.model.text,
            request,
            started,
            &self.cancel,
            print,
        )?;
        // One that has failed, or was stopped, is of no use any more.
        own.conversation = Some(conversation);
        Ok(done)
    }
}

/// Shows what a turn brings.
type Tell<'a> = Box<dyn FnMut(&Event<'_>) -> Result<(), Failure> + 'a>;

/// What is to be shown.
enum Event<'a> {
    Frame(&'a Frame),
    /// The service has given no sign of life for a while; in words.
    Silent(&'a str),
    /// The service is gone, and this process goes on.
    Alone,
}

const ALONE: &str = "going on without the service on this machine";

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
    let mut print = |event: Event<'_>| match event {
        Event::Frame(frame) => print(frame),
        Event::Silent(_) | Event::Alone => Ok(()),
    };
    let answer = printing(&mut print, cancel, |emit| {
        let mut emit = |frame: &Frame| emit(Event::Frame(frame));
        conversation.answer(text, request, started, cancel, &mut emit)
    })?;
    Ok(answer?)
}

/// Runs something that emits events, which are printed. It is cancelled when that fails.
fn printing<T>(
    print: &mut dyn FnMut(Event<'_>) -> Result<(), Failure>,
    cancel: &Cancel,
    run: impl FnOnce(&mut dyn FnMut(Event<'_>)) -> T,
) -> Result<T, Failure> {
    let mut failed = None;
    let result = run(&mut |event| {
        if failed.is_none()
            && let Err(failure) = print(event)
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

/// Prints the text of `token_delta` frames: on a terminal what is fit for one, else as it is.
pub(crate) fn print_text(frame: &Frame) -> Result<(), Failure> {
    match frame {
        Frame::TokenDelta { text, .. } if text.is_empty() => Ok(()),
        Frame::TokenDelta { text, .. } if std::io::stdout().is_terminal() => print(text),
        Frame::TokenDelta { text, .. } => print_bytes(text),
        _ => Ok(()),
    }
}
