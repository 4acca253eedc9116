//! The caller's own machine instead of hosts: it computes all layers in the thread of the simulation.

use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use hearthnet_engine::{Engine, EngineError, SeqId, Span};
use hearthnet_orchestrator::backend::{Output, Rows, Run};
use hearthnet_orchestrator::{Backend, Cancel, ChatError};
use hearthnet_testkit::one_thread;

use crate::model::{LAYERS, Model};

fn failed(error: impl ToString) -> ChatError {
    ChatError::Engine(error.to_string())
}

/// All layers in this thread.
pub(crate) struct Here {
    engine: Engine,
    seq: SeqId,
    model: Arc<Model>,
    output: Result<Vec<f32>, ChatError>,
}

impl Here {
    pub(crate) fn load(model: &Arc<Model>) -> Result<Self, ChatError> {
        let engine = Engine::load(&model.file, 0..LAYERS, &one_thread(), &mut |_, _| {});
        let mut engine = engine.map_err(failed)?;
        let seq = engine.open().map_err(failed)?;
        let model = Arc::clone(model);
        let output = Ok(Vec::new());
        Ok(Self {
            engine,
            seq,
            model,
            output,
        })
    }

    fn compute(&mut self, rows: Rows<'_>) -> Result<Vec<f32>, EngineError> {
        let width = self.model.width();
        self.engine.truncate(self.seq, rows.position)?;
        let mut x = rows.values.to_vec();
        let count = (x.len() / width) as u32;
        let span = Span::new(self.seq, rows.position, count);
        self.engine.forward(&[span], &mut x)?;
        let kept = if rows.all {
            0
        } else {
            x.len().saturating_sub(width)
        };
        Ok(x.split_off(kept))
    }
}

impl Backend for Here {
    fn submit<'a>(&'a mut self, rows: Rows<'a>, _: &'a Cancel) -> LocalBoxFuture<'a, ()> {
        let computed = self.compute(rows);
        self.output = computed.map_err(failed);
        std::future::ready(()).boxed_local()
    }

    fn output<'a>(&'a mut self, _: &'a mut Run<'_>) -> Output<'a> {
        let output = std::mem::replace(&mut self.output, Ok(Vec::new()));
        std::future::ready(output).boxed_local()
    }
}
