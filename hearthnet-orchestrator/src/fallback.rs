//! From hosts to this machine in the middle of an answer.
//!
//! The rows that were handed to the hosts are kept (boundary 0: the embeddings, or what the
//! caller's own first layers made of them). The layers that hosts ran run them once here, and
//! the answer goes on with the next token: what was said stays said, since the arithmetic is
//! the same.

use std::future::ready;
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use hearthnet_bus::flight::{self, Event, PipelineId};
use tokio::runtime::Handle;

use crate::backend::{Backend, HopTimes, RouteHop, Run, whole_ms};
use crate::chat::Frame;
use crate::error::{Blame, ChatError};
use crate::sharded::ShardedBackend;
use crate::{Cancel, steps};

/// Makes the backend that holds the layers that hosts were asked for. It may take seconds.
pub type LoadLocal = Box<dyn FnOnce() -> Result<Box<dyn Backend>, ChatError> + Send>;

/// Hosts first; this machine when they cannot go on.
pub struct WithFallback {
    /// `None` once they have failed for good.
    hosts: Option<ShardedBackend>,
    load: Option<LoadLocal>,
    local: Option<Box<dyn Backend>>,
    /// Why there were no hosts from the beginning, and since when, until it has been told.
    alone: Option<(ChatError, Instant)>,
    /// What the flight record calls it, wherever it runs.
    pipeline: PipelineId,
}

impl WithFallback {
    /// `load` is called at most once, when the hosts have failed for good.
    pub fn new(hosts: ShardedBackend, load: LoadLocal) -> Self {
        Self {
            pipeline: hosts.name(),
            hosts: Some(hosts),
            load: Some(load),
            local: None,
            alone: None,
        }
    }

    /// Begins with the hosts, or here when none could be had: a new question falls back as a
    /// running answer does. Blocks while this machine loads what it needs.
    ///
    /// # Errors
    /// The hosts' own, when it is not theirs to answer for; [`ChatError::Cancelled`]; and what
    /// loading fails with.
    pub fn begin(
        hosts: Result<ShardedBackend, ChatError>,
        load: LoadLocal,
        runtime: &Handle,
        cancel: &Cancel,
    ) -> Result<Self, ChatError> {
        let since = Instant::now();
        let error = match hosts {
            Ok(hosts) => return Ok(Self::new(hosts, load)),
            Err(error) if error.blame() == Blame::Peer => error,
            Err(error) => return Err(error),
        };
        tracing::warn!(
            code = %error.code(),
            "answering without hosts, on this machine: {error}"
        );
        metrics::counter!("distributed_inference_fallback_to_local_total").increment(1);
        let local = steps::block_on(loaded(runtime, load, cancel))?;
        Ok(Self {
            pipeline: PipelineId::draw(),
            hosts: None,
            load: None,
            local: Some(local),
            alone: Some((error, since)),
        })
    }

    /// Says once that hosts could not be had from the beginning.
    fn tell_alone(&mut self, run: &mut Run<'_>) {
        let (Some((error, since)), Some(local)) = (self.alone.take(), &self.local) else {
            return;
        };
        for all in local.route() {
            self.tell(all.shard_id, &error, 0, since, run);
        }
    }

    fn tell(
        &self,
        shard_id: String,
        error: &ChatError,
        replayed: u32,
        since: Instant,
        run: &mut Run<'_>,
    ) {
        flight::record(Event::FailedOver {
            pipeline: self.pipeline,
            host: None,
            shard: shard_id.as_str().into(),
            code: error.code(),
            replacements: 0,
            replayed,
            ms: whole_ms(since.elapsed()),
        });
        (run.notify)(Frame::ShardFailover {
            shard_id,
            host: None,
            code: error.code(),
            replacements: Vec::new(),
            replayed,
            recovery_ms: since.elapsed().as_secs_f64() * 1e3,
        });
    }

    fn active(&self) -> Option<&dyn Backend> {
        match &self.local {
            Some(local) => Some(local.as_ref()),
            None => self.hosts.as_ref().map(|hosts| hosts as &dyn Backend),
        }
    }

    fn active_mut(&mut self) -> Option<&mut (dyn Backend + '_)> {
        match &mut self.local {
            Some(local) => Some(local.as_mut()),
            None => self.hosts.as_mut().map(|hosts| hosts as &mut dyn Backend),
        }
    }

    async fn through(&mut self, out: &mut Vec<f32>, run: &mut Run<'_>) -> Result<(), ChatError> {
        let Some(active) = self.active_mut() else {
            return Err(ChatError::Engine("it failed earlier in this chat".into()));
        };
        match active.output(out, run).await {
            Err(error) if error.blame() == Blame::Peer => self.take_over(error, out, run).await,
            Ok(()) => {
                self.tell_alone(run);
                Ok(())
            }
            error => error,
        }
    }

    /// Runs here what the hosts were given.
    async fn take_over(
        &mut self,
        error: ChatError,
        out: &mut Vec<f32>,
        run: &mut Run<'_>,
    ) -> Result<(), ChatError> {
        let since = Instant::now();
        let (Some(load), Some(mut hosts)) = (self.load.take(), self.hosts.take()) else {
            return Err(error);
        };
        tracing::warn!(
            code = %error.code(),
            "going on without hosts, on this machine: {error}"
        );
        metrics::counter!("distributed_inference_fallback_to_local_total").increment(1);
        let runtime = hosts.runtime().clone();
        let (replayed, held) = (hosts.length(), hosts.submitted()?);
        // Those that still work have nothing more to do for this sequence.
        drop(hosts);
        let mut local = loaded(&runtime, load, run.cancel).await?;
        local.begin_call();
        local.submit(0, &held, run.cancel).await;
        local.output(out, run).await?;
        for all in local.route() {
            self.tell(all.shard_id, &error, replayed, since, run);
        }
        self.local = Some(local);
        Ok(())
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
    fn submit_part<'a>(
        &'a mut self,
        position: u32,
        rows: &'a [f32],
        more: u32,
        cancel: &'a Cancel,
    ) -> LocalBoxFuture<'a, ()> {
        match self.active_mut() {
            Some(active) => active.submit_part(position, rows, more, cancel),
            None => ready(()).boxed_local(),
        }
    }

    fn output<'a>(
        &'a mut self,
        out: &'a mut Vec<f32>,
        run: &'a mut Run<'_>,
    ) -> LocalBoxFuture<'a, Result<(), ChatError>> {
        self.through(out, run).boxed_local()
    }

    fn beside(&mut self, per_layer: Duration) {
        if let Some(active) = self.active_mut() {
            active.beside(per_layer);
        }
    }

    fn route(&self) -> Vec<RouteHop> {
        self.active().map_or_else(Vec::new, Backend::route)
    }

    fn times(&self) -> Vec<HopTimes> {
        self.active().map_or_else(Vec::new, Backend::times)
    }

    fn begin_call(&mut self) {
        if let Some(active) = self.active_mut() {
            active.begin_call();
        }
    }

    fn expect(&mut self, positions: u32) {
        if let Some(active) = self.active_mut() {
            active.expect(positions);
        }
    }

    fn end_call(&mut self) {
        if let Some(active) = self.active_mut() {
            active.end_call();
        }
    }

    fn pipeline(&self) -> Option<PipelineId> {
        Some(self.pipeline)
    }

    /// Not once it runs here: the next question is for the hosts again.
    fn is_alive(&self) -> bool {
        self.local.is_none() && self.active().is_some_and(Backend::is_alive)
    }
}
