//! Fallback from hosts to this machine in the middle of an answer.
//!
//! The rows sent to the hosts are kept (the embeddings, or the output of the caller's private
//! layers). The local layers process them once, and the answer continues with the next token. The
//! text stays valid, since the arithmetic is the same. If it differs, a running answer only
//! continues here if the caller accepts any arithmetic.

use std::future::ready;
use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use hearthnet_bus::flight::PipelineId;
use hearthnet_engine::ARITHMETIC;
use hearthnet_transport::run_blocking;
use tokio::runtime::Handle;
use tokio::time::Instant;

use crate::Cancel;
use crate::backend::events::{Failover, fell_back};
use crate::backend::sharded::ShardedBackend;
use crate::backend::{Backend, Output, Rows, Run};
use crate::error::ChatError;
use crate::exact::{Arithmetics, Exact};
use crate::steps::chat_loop;

/// Loads a backend with the layers that hosts were to run. It may take seconds.
pub type LoadLocal = Arc<dyn Fn() -> Result<Box<dyn Backend>, ChatError> + Send + Sync>;

/// Hosts first; this machine if they fail.
pub struct WithFallback {
    runs: Runs,
    /// Error of the hosts if there were none from the start, and the time of the request, until
    /// reported.
    alone: Option<(ChatError, Instant)>,
    /// Id in the flight record, for hosts and for this machine.
    pipeline: PipelineId,
    exact: Exact,
    /// True once a row of the answer has arrived.
    answering: bool,
    /// Whether the output has all submitted rows.
    all: bool,
}

/// Number of recomputed positions, and the arithmetics before.
type Left = (u32, Arithmetics);

enum Runs {
    Hosts(Box<ShardedBackend>, LoadLocal),
    Here(Box<dyn Backend>),
    /// The hosts have failed, and this machine has not taken over.
    Nowhere,
}

impl WithFallback {
    /// Starts with the hosts, or here if there are none. `since` is the time of the request to the
    /// hosts, `exact` the rule by which they were selected. `load` is called at most once for each
    /// sequence, when needed; the call blocks meanwhile.
    ///
    /// # Errors
    /// The hosts' error, if it is not the hosts' fault; [`ChatError::Cancelled`]; errors of `load`.
    pub fn begin(
        hosts: Result<ShardedBackend, ChatError>,
        since: Instant,
        load: LoadLocal,
        exact: Exact,
        runtime: &Handle,
        cancel: &Cancel,
    ) -> Result<Self, ChatError> {
        chat_loop::block_on(Self::begun(hosts, since, load, exact, runtime, cancel))
    }

    /// [`Self::begin`] on the loop of the calling chat.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub async fn begun(
        hosts: Result<ShardedBackend, ChatError>,
        since: Instant,
        load: LoadLocal,
        exact: Exact,
        runtime: &Handle,
        cancel: &Cancel,
    ) -> Result<Self, ChatError> {
        let (pipeline, runs, alone) = match hosts {
            Ok(hosts) => (hosts.name(), Runs::Hosts(Box::new(hosts), load), None),
            Err(error) if error.blames_host() => {
                fell_back(&error, "answering");
                let here = Runs::Here(loaded(runtime, load, cancel).await?);
                (PipelineId::draw(), here, Some((error, since)))
            }
            Err(error) => return Err(error),
        };
        Ok(Self {
            runs,
            alone,
            pipeline,
            exact,
            answering: false,
            all: false,
        })
    }

    async fn through(&mut self, run: &mut Run<'_>) -> Result<Vec<f32>, ChatError> {
        let Some(active) = self.inner_mut() else {
            return Err(ChatError::Engine("it failed earlier in this chat".into()));
        };
        let (out, left, why) = match active.output(run).await {
            Err(error) if error.blames_host() => {
                let (out, left, since) = self.take_over(&error, run).await?;
                (out, Some(left), Some((error, since)))
            }
            // Missing hosts at the start are reported once.
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
            failover.report(run);
        }
        Ok(out)
    }

    /// Recomputes the submitted rows here. Returns the output, the recomputed part, and the time at
    /// which the failure was noticed; a search for other hosts may have followed it.
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
                "{error}; the answer began with {before}, but this machine computes with \
                 {ARITHMETIC}"
            )));
        }
        fell_back(error, "going on");
        let runtime = hosts.runtime().clone();
        let (replayed, held) = (hosts.length(), hosts.submitted()?);
        // All rows of this machine come for free, to compare those of the hosts with.
        let audit = hosts.take_over();
        // Hosts that still work are not needed any more.
        drop(hosts);
        let mut local = loaded(&runtime, load, run.cancel).await?;
        local.begin_call(0);
        let rows = Rows {
            all: self.all || audit.is_some(),
            ..Rows::at(0, &held)
        };
        local.submit(rows, run.cancel).await;
        let mut out = local.output(run).await?;
        if let Some(mut audit) = audit {
            audit.compare(&out);
            if let Some(row) = audit.last_row.filter(|_| !self.all) {
                out.drain(..out.len().saturating_sub(row));
            }
        }
        if !self.answering {
            // No row of the answer came from the hosts.
            before = Arithmetics::of(&local.route());
        }
        self.runs = Runs::Here(local);
        Ok((out, (replayed, before), since))
    }
}

/// Runs `load` on a blocking thread. Loading cannot be interrupted, but a cancelled chat does not
/// wait for it.
async fn loaded(
    runtime: &Handle,
    load: LoadLocal,
    cancel: &Cancel,
) -> Result<Box<dyn Backend>, ChatError> {
    let loading = run_blocking(runtime, move || load());
    let loaded = cancel.run_until_cancelled(loading).await;
    loaded
        .ok_or(ChatError::Cancelled)?
        .map_err(|e| ChatError::Engine(e.to_string()))?
}

impl Backend for WithFallback {
    fn submit<'a>(&'a mut self, rows: Rows<'a>, cancel: &'a Cancel) -> LocalBoxFuture<'a, ()> {
        self.all = rows.all;
        match self.inner_mut() {
            Some(active) => active.submit(rows, cancel),
            None => ready(()).boxed_local(),
        }
    }

    fn output<'a>(&'a mut self, run: &'a mut Run<'_>) -> Output<'a> {
        self.through(run).boxed_local()
    }

    fn fork(&mut self) -> LocalBoxFuture<'_, Option<Box<dyn Backend>>> {
        let forked = async move {
            let (pipeline, runs) = match &mut self.runs {
                Runs::Hosts(hosts, load) => {
                    let hosts = Box::new(hosts.forked()?);
                    (hosts.name(), Runs::Hosts(hosts, Arc::clone(load)))
                }
                Runs::Here(local) => (PipelineId::draw(), Runs::Here(local.fork().await?)),
                Runs::Nowhere => return None,
            };
            let fork = Self {
                runs,
                alone: None,
                pipeline,
                exact: self.exact,
                answering: self.answering,
                all: false,
            };
            Some(Box::new(fork) as Box<dyn Backend>)
        };
        forked.boxed_local()
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

    /// False once a row was computed here, so that the next request tries the hosts again.
    fn is_alive(&self) -> bool {
        match &self.runs {
            Runs::Hosts(hosts, _) => hosts.is_alive(),
            Runs::Here(_) => self.alone.is_some(),
            Runs::Nowhere => false,
        }
    }
}
