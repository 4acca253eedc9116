//! A turn of a chat: requests the answer and prints it as it arrives.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use hearthnet_files::sampling::SamplingChoice;
use hearthnet_hub::catalogue::Resolved;
use hearthnet_orchestrator::chat::{
    AnswerOptions, ChatRequest, Conversation, Done, FinishReason, Frame, Prompt, TurnOptions, check,
};
use hearthnet_orchestrator::{ChatError, bus};

use super::screen::Screen;
use super::{Chat, LocalBackend};
use crate::answering::stream::{Printer, stream_answer};
use crate::answering::timing_report::explain;
use crate::cli::args::ChatArgs;
use crate::cli::{Failure, note, print, print_json};
use crate::node::Process;

/// Result of a turn.
pub(super) struct Turn {
    /// Text of the answer, also if it was stopped.
    pub(super) said: String,
    pub(super) end: Result<Done, Failure>,
    /// Failover frames of this answer.
    pub(super) moves: Vec<Frame>,
}

/// Prints an answer in the requested form, and keeps what the end of the turn needs.
struct Printed<'a> {
    args: &'a ChatArgs,
    screen: Screen,
    /// Name of a host.
    names: Box<dyn Fn(&str) -> String>,
    said: String,
    moves: Vec<Frame>,
}

impl Printed<'_> {
    fn frame(&mut self, frame: &Frame) -> Result<(), Failure> {
        match frame {
            Frame::TokenDelta { text, .. } => self.said.push_str(text),
            Frame::ShardFailover { .. } => self.moves.push(frame.clone()),
            _ => {}
        }
        match (self.args.json, self.args.frames) {
            (true, _) => Ok(()),
            (_, true) => print_json(frame),
            _ => self.screen.frame(frame, &self.names),
        }
    }

    fn notice(&mut self, line: &str) -> Result<(), Failure> {
        if self.args.json || self.args.frames {
            note(line);
            return Ok(());
        }
        self.screen.notice(&format!("[{line}]"))
    }
}

impl Chat<'_> {
    /// Answers one prompt and prints the answer in the requested form. Ctrl-C stops it.
    pub(super) fn turn(&mut self, prompt: Prompt, started: Instant) -> Turn {
        let answering = self.interrupts.answering();
        self.cancel = answering.cancel.clone();
        let sampling = self.model_sampling();
        let mut printed = Printed {
            args: self.args,
            screen: Screen::new(self.style),
            names: Box::new(self.names()),
            said: String::new(),
            moves: Vec::new(),
        };
        let end = sampling.and_then(|own| self.show(prompt, &own, started, &mut printed));
        // A stopped answer keeps the text printed so far.
        let ended = match (self.args.json, self.args.frames) {
            (false, false) => printed.screen.end(),
            _ => Ok(()),
        };
        let end = end.and_then(|done| ended.map(|()| done));
        if let Ok(done) = &end {
            self.comment(done, &printed.moves);
        }
        Turn {
            said: printed.said,
            end,
            moves: printed.moves,
        }
    }

    /// Sampling of the answering model. If the service ended during the last answer, prepares this
    /// process to answer.
    fn model_sampling(&mut self) -> Result<SamplingChoice, Failure> {
        if let Some(service) = &self.service {
            return Ok(service.model.sampling);
        }
        let own = match self.own.take() {
            Some(own) => own,
            None => self.open()?,
        };
        let sampling = own.model.text.sampling;
        self.own = Some(own);
        Ok(sampling)
    }

    fn show(
        &mut self,
        prompt: Prompt,
        own: &SamplingChoice,
        started: Instant,
        printed: &mut Printed<'_>,
    ) -> Result<Done, Failure> {
        let request = ChatRequest {
            prompt,
            sampling: self.sampling.over(own)?,
            max_tokens: self.sampling.max_tokens,
            stop: self.sampling.stop.clone(),
            exact: self.args.exact,
            grammar: self.grammar.clone(),
            turn: TurnOptions::default(),
            options: AnswerOptions::default(),
        };
        let done = self.answer(&request, started, printed)?;
        if self.args.json {
            print_json(&done)?;
        } else if !self.args.frames && !std::io::stdout().is_terminal() {
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
        printed: &mut Printed<'_>,
    ) -> Result<Done, Failure> {
        let mut said = 0;
        if let Some(asked) = &self.service {
            let (runtime, cancel) = (self.runtime.handle(), &self.cancel);
            let inference = &self.cx.config.research.distributed_inference;
            let stall = Duration::from_secs_f64(inference.shard_health_timeout_seconds);
            let mut printer = Printer::new(cancel);
            let mut tell = |news: bus::News<'_>| match news {
                bus::News::Frame(frame) => printer.run(|| printed.frame(frame)),
                bus::News::Silent => {
                    let process = Process::of(&asked.dir);
                    let said = format!(
                        "the service on this machine, {process}, does not answer; waiting up to {} s",
                        stall.as_secs()
                    );
                    printer.run(|| printed.notice(&said));
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
            self.begun = self.service.take().map(|asked| Resolved {
                path: asked.model.path,
                id: asked.model.id,
            });
            if !self.args.json {
                printed.notice("continuing without the service on this machine")?;
            }
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
            frame => printed.frame(frame),
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
