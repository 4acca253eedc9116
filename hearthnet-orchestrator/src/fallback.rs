//! From hosts to this machine in the middle of an answer.
//!
//! The rows that were handed to the hosts are kept (boundary 0: the embeddings, or what the
//! caller's own first layers made of them). The layers that hosts ran run them once here, and
//! the answer goes on with the next token: what was said stays said, since the arithmetic is
//! the same. Where it was not, an answer that has begun goes on here only if the caller takes any.

use std::future::ready;
use std::time::Instant;

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use hearthnet_bus::flight::PipelineId;
use hearthnet_model::ARITHMETIC;
use tokio::runtime::Handle;

use crate::backend::{Backend, Output, Rows, Run};
use crate::error::{Blame, ChatError};
use crate::events::{Failover, fell_back};
use crate::exact::{Arithmetics, Exact};
use crate::sharded::ShardedBackend;
use crate::{Cancel, steps};

/// Makes the backend that holds the layers that hosts were asked for. It may take seconds.
pub type LoadLocal = Box<dyn FnOnce() -> Result<Box<dyn Backend>, ChatError> + Send>;

/// Hosts first; this machine when they cannot go on.
pub struct WithFallback {
    runs: Runs,
    /// Why there were no hosts from the beginning, and since when, until it has been told.
    alone: Option<(ChatError, Instant)>,
    /// What the flight record calls it, wherever it runs.
    pipeline: PipelineId,
    exact: Exact,
    /// Whether a row of the answer has come.
    answering: bool,
}

/// Positions that were computed again, and what with before.
type Left = (u32, Arithmetics);

/// Where the layers run.
enum Runs {
    Hosts(Box<ShardedBackend>, LoadLocal),
    Here(Box<dyn Backend>),
    /// Hosts have failed, and this machine has not taken over.
    Nowhere,
}

impl WithFallback {
    /// Begins with the hosts, or here when none could be had: a new question falls back as a
    /// running answer does. `since` is when the hosts were asked, `exact` what they were chosen by. `load` is called once at most, and
    /// when it is needed; this blocks meanwhile.
    ///
    /// # Errors
    /// The hosts' own, when it is not theirs to answer for; [`ChatError::Cancelled`]; and what
    /// loading fails with.
    pub fn begin(
        hosts: Result<ShardedBackend, ChatError>,
        since: Instant,
        load: LoadLocal,
        exact: Exact,
        runtime: &Handle,
        cancel: &Cancel,
    ) -> Result<Self, ChatError> {
        let error = match hosts {
            Ok(hosts) => {
                return Ok(Self {
                    pipeline: hosts.name(),
                    runs: Runs::Hosts(Box::new(hosts), load),
                    alone: None,
                    exact,
                    answering: false,
                });
            }
            Err(error) if error.blame() == Blame::Peer => error,
            Err(error) => return Err(error),
        };
        fell_back(&error, "answering");
        Ok(Self {
            pipeline: PipelineId::draw(),
            runs: Runs::Here(steps::block_on(loaded(runtime, load, cancel))?),
            alone: Some((error, since)),
            exact,
            answering: false,
        })
    }

    async fn through(&mut self, run: &mut Run<'_>) -> Result<Vec<f32>, ChatError> {
        let Some(active) = self.inner_mut() else {
            return Err(ChatError::Engine("it failed earlier in this chat".into()));
        };
        let (out, left, why) = match active.output(run).await {
            Err(error) if error.blame() == Blame::Peer => {
                let (out, left, since) = self.take_over(&error, run).await?;
                (out, Some(left), Some((error, since)))
            }
            // That hosts could not be had from the beginning is said once.
            output => (output?, None, self.alone.take()),
        };
        self.answering = true;
        let Some((error, since)) = why else {
            return Ok(out);
        };
        for all in self.route() {
            let now = Arithmetics::from_iter([all.arithmetic]);
            let (replayed, before) = left.clone().unwrap_or_else(|| (0, now.clone()));
            let failover = Failover {
                pipeline: self.pipeline,
                shard_id: all.shard_id,
                from: None,
                to: Vec::new(),
                code: error.code(),
                replayed,
                before,
                now,
                since,
            };
            failover.tell(run);
        }
        Ok(out)
    }

    /// Runs here what the hosts were given: what comes out, what they have left, and when the failure
    /// was noticed: others may have been waited for since.
    async fn take_over(
        &mut self,
        error: &ChatError,
        run: &mut Run<'_>,
    ) -> Result<(Vec<f32>, Left, Instant), ChatError> {
        let Runs::Hosts(mut hosts, load) = std::mem::replace(&mut self.runs, Runs::Nowhere) else {
            return Err(error.clone());
        };
        let since = hosts.failed_at().unwrap_or_else(Instant::now);
        let mut before = Arithmetics::of(&hosts.route());
        if self.answering && self.exact != Exact::Any && !before.is_exact() {
            return Err(ChatError::ArithmeticMismatch(format!(
                "{error}; the answer was begun with {before}, and this machine computes with {ARITHMETIC}"
            )));
        }
        fell_back(error, "going on");
        let runtime = hosts.runtime().clone();
        let (replayed, held) = (hosts.length(), hosts.submitted()?);
        // Those that still work have nothing more to do for this sequence.
        drop(hosts);
        let mut local = loaded(&runtime, load, run.cancel).await?;
        local.begin_call(0);
        local.submit(Rows::at(0, &held), run.cancel).await;
        let out = local.output(run).await?;
        if !self.answering {
            // All rows of the answer are made here.
            before = Arithmetics::of(&local.route());
        }
        self.runs = Runs::Here(local);
        Ok((out, (replayed, before), since))
    }
}

/// Loading cannot be interrupted, but nobody who has given up need wait for it.
async fn loaded(
    runtime: &Handle,
    load: LoadLocal,
    cancel: &Cancel,
) -> Result<Box<dyn Backend>, ChatError> {
    let loading = runtime.spawn_blocking(load);
    let loaded = cancel.or(loading).await;
    loaded
        .ok_or(ChatError::Cancelled)?
        .map_err(|e| ChatError::Engine(e.to_string()))?
}

impl Backend for WithFallback {
    fn submit<'a>(&'a mut self, rows: Rows<'a>, cancel: &'a Cancel) -> LocalBoxFuture<'a, ()> {
        match self.inner_mut() {
            Some(active) => active.submit(rows, cancel),
            None => ready(()).boxed_local(),
        }
    }

    fn output<'a>(&'a mut self, run: &'a mut Run<'_>) -> Output<'a> {
        self.through(run).boxed_local()
    }

    fn inner(&self) -> Option<&dyn Backend> {
        match &self.runs {
            Runs::Hosts(hosts, _) => Some(hosts.as_ref()),
            Runs::Here(local) => Some(local.as_ref()),
            Runs::Nowhere => None,
        }
    }

    fn inner_mut(&mut self) -> Option<&mut dyn Backend> {
        match &mut self.runs {
            Runs::Hosts(hosts, _) => Some(hosts.as_mut()),
            Runs::Here(local) => Some(local.as_mut()),
            Runs::Nowhere => None,
        }
    }

    fn begin_call(&mut self, positions: u32) {
        self.answering = false;
        if let Some(inner) = self.inner_mut() {
            inner.begin_call(positions);
        }
    }

    fn pipeline(&self) -> Option<PipelineId> {
        Some(self.pipeline)
    }

    /// Not once it runs here: the next question is for the hosts again.
    fn is_alive(&self) -> bool {
        matches!(&self.runs, Runs::Hosts(hosts, _) if hosts.is_alive())
    }
}
