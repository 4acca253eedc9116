//! A turn of a chat: requests the answer and prints it as it arrives.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use hearthnet_files::sampling::SamplingChoice;
use hearthnet_orchestrator::chat::{
    ChatRequest, Conversation, Done, FinishReason, Frame, Prompt, check,
};
use hearthnet_orchestrator::{ChatError, bus};

use super::screen::Screen;
use super::{Chat, LocalBackend};
use crate::answering::stream::{Printer, stream_answer};
use crate::answering::timing_report::explain;
use crate::cli::failure::Failure;
use crate::cli::output::{note, print, print_json};
use crate::node::local_api::Process;

/// Result of a turn.
pub(super) struct Turn {
    /// Text of the answer, also if it was stopped.
    pub(super) said: String,
    pub(super) end: Result<Done, Failure>,
    /// Failover frames of this answer.
    pub(super) moves: Vec<Frame>,
}

impl Chat<'_> {
    /// Answers one prompt and prints the answer in the requested form. Ctrl-C stops it.
    pub(super) fn turn(&mut self, prompt: Prompt, started: Instant) -> Turn {
        let mut turn = Turn {
            said: String::new(),
            end: Err(Failure::internal("no backend was asked")),
            moves: Vec::new(),
        };
        let interrupts = std::sync::Arc::clone(&self.interrupts);
        let answering = interrupts.answering();
        self.cancel = answering.cancel.clone();
        let mut screen = Screen::new(self.style);
        let end = self.show(prompt, started, &mut screen, &mut turn);
        // A stopped answer keeps the text printed so far.
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
            // The service ended during the last answer.
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
        let mut told: EventPrinter<'_> = match (args.json, args.frames) {
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

    /// Prints notes after an answer: timings, or the reason for an early end.
    fn comment(&self, done: &Done, moves: &[Frame]) {
        if self.explain {
            note(explain(done, moves));
        }
        let cut = done.finish_reason == FinishReason::Length;
        if cut && !self.args.json && !self.args.frames {
            let more = match self.interactive {
                true => ("`/set max_tokens N`", "`/reset` clears the conversation"),
                false => ("`--max-tokens N`", "a shorter question leaves more"),
            };
            note(self.style.dim(&match self.sampling.max_tokens {
                Some(most) if done.usage.completion_tokens >= most => format!(
                    "[stopped at the limit of {most} tokens; {} sets another limit]",
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

    /// Asks the service, if there is one. Answers in this process if there is none or if it ends;
    /// the text that the service has printed is not repeated.
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
            let mut printer = Printer::new(cancel);
            let mut tell = |news: bus::News<'_>| match news {
                bus::News::Frame(frame) => printer.run(|| told(Event::Frame(frame))),
                bus::News::Silent => {
                    let process = Process::of(&asked.dir);
                    let said = format!(
                        "the service on this machine, {process}, does not answer; waiting up to {} s",
                        stall.as_secs()
                    );
                    printer.run(|| told(Event::Silent(&said)));
                }
                _ => {}
            };
            let (client, model) = (&asked.client, &asked.model.id);
            let answer = bus::answer(runtime, client, model, request, cancel, stall, &mut tell);
            let answer = printer.end(answer)?;
            match answer {
                Ok(done) => return Ok(done),
                // Other errors concern the call, or a service that is stopping: this process may
                // succeed.
                Err(bus::Unanswered {
                    heard,
                    arithmetic,
                    error,
                    ..
                }) => match error.and_then(|error| Failure::of_answer(&error, cancel)) {
                    Some(failure) => return Err(failure),
                    None if heard > 0 && !arithmetic.is_exact() => {
                        return Err(ChatError::ArithmeticMismatch(format!(
                            "the service on this machine ended, and an answer begun with {arithmetic} cannot be continued without it"
                        ))
                        .into());
                    }
                    None => said = heard,
                },
            }
            // Only the same model can finish the answer of the service.
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
        own: &mut LocalBackend,
        request: &ChatRequest,
        started: Instant,
        print: &mut dyn FnMut(&Frame) -> Result<(), Failure>,
    ) -> Result<Done, Failure> {
        // Reject an invalid request before it costs a conversation.
        check(&own.model.text, request)?;
        // A conversation that fell back to this machine returns to hosts with the next question.
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
        // A failed or stopped conversation is dropped instead.
        own.conversation = Some(conversation);
        Ok(done)
    }
}

type EventPrinter<'a> = Box<dyn FnMut(&Event<'_>) -> Result<(), Failure> + 'a>;

enum Event<'a> {
    Frame(&'a Frame),
    /// The service has not responded for a while; holds the message.
    Silent(&'a str),
    /// The service ended, and this process continues.
    Alone,
}

const ALONE: &str = "continuing without the service on this machine";
