//! The child's side: runs an exact engine for a host in another process.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;

use hearthnet_engine::{Engine, EngineOptions};
use hearthnet_files::spec::RowShape;
use hearthnet_files::{Gguf, Manifest, ModelError, ModelFile};
use hearthnet_platform::cores::SharedCore;
use hearthnet_platform::machine::stand_back;
use hearthnet_platform::pipe::Pipe;

use super::message::{
    CLOSE, DONE, FAULT, FORK, FORWARD, Fields, LOAD, LOADED, Load, Malformed, Message, OPEN,
    TRUNCATE, wipe, write_fault, write_load_fault, write_progress,
};
use crate::batch::values_before;
use crate::device::Device;
use crate::engine::{LayerEngine, LoadFault, LoadPhase, Span, StartProgress, in_phase};
use crate::fault::StreamFault;

/// Limit of a request. A host sends at most a prefill chunk and some decode rows.
const REQUEST_LIMIT: usize = 1 << 30;

/// Loads layers of the model file that the host sends, and computes for it until the connection
/// ends. Opens no file and no socket.
///
/// `begin` is called once, with the device that the host has chosen, before the model is read: it
/// opens a graphics card, sandboxes this process, and returns the function that loads the layers,
/// for instance [`load_on_processor`].
///
/// # Errors
/// An error of the connection, or a request that no host sends.
pub fn serve_engine<E, L>(pipe: &Pipe, begin: impl FnOnce(Device) -> L) -> io::Result<()>
where
    E: LayerEngine,
    L: FnOnce(
        &ModelFile,
        Range<u32>,
        &EngineOptions,
        &mut dyn FnMut(u64, u64),
    ) -> Result<E, LoadFault>,
{
    let mut message = Message::default();
    let (kind, fields) = match message.receive(pipe, REQUEST_LIMIT) {
        Err(end) if end.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
        received => received?,
    };
    if kind != LOAD {
        return Err(Malformed.into());
    }
    let (count, load) = Load::read(fields)?;
    let load_layers = begin(load.device);
    let mut files = Vec::new();
    for _ in 0..count {
        let Some(file) = pipe.receive_file()? else {
            return Ok(());
        };
        files.push(file);
    }
    stand_back(load.niceness);
    let loaded = load_engine(&files, &load, load_layers, &mut |step| {
        write_progress(step, &mut message);
        message.send(pipe)
    });
    let (rows, engine) = match loaded {
        Ok(loaded) => loaded,
        Err(fault) => {
            write_load_fault(&fault, &mut message);
            return message.send(pipe);
        }
    };
    serve(pipe, engine, rows)
}

/// Values of the rows, and the engine. A closed connection ends the load.
fn load_engine<E>(
    files: &[File],
    load: &Load,
    load_layers: impl FnOnce(
        &ModelFile,
        Range<u32>,
        &EngineOptions,
        &mut dyn FnMut(u64, u64),
    ) -> Result<E, LoadFault>,
    report: &mut dyn FnMut(StartProgress) -> io::Result<()>,
) -> Result<(RowShape, E), LoadFault> {
    let manifest = Manifest::decode(&load.manifest).map_err(|error| error.to_string())?;
    let gguf = Gguf::map(files, Path::new("the model"));
    let model = ModelFile::from_gguf(gguf.map_err(ModelError::from)?)?
        .with_formats(manifest.spec().formats());
    let mut progress = |step| {
        if report(step).is_err() {
            // The host has ended: so does this process, whose only work is this load.
            std::process::exit(1);
        }
    };
    let range = load.range.clone();
    let verified = manifest.verify(
        &model,
        range.clone(),
        false,
        &mut in_phase(LoadPhase::Verifying, &mut progress),
    );
    verified.map_err(|error| error.to_string())?;
    let loading = &mut in_phase(LoadPhase::Loading, &mut progress);
    let engine = load_layers(&model, range, &load.options, loading)?;
    Ok((manifest.spec().row_shape(), engine))
}

/// Loads layers onto the processor.
///
/// # Errors
/// See [`LoadFault`].
pub fn load_on_processor(
    file: &ModelFile,
    layers: Range<u32>,
    options: &EngineOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Engine, LoadFault> {
    Ok(Engine::load(file, layers, options, progress)?)
}

/// Answers requests until the connection ends.
pub(super) fn serve<E: LayerEngine>(pipe: &Pipe, engine: E, shape: RowShape) -> io::Result<()> {
    let mut message = Message::default();
    let footprint = engine.footprint();
    message.start(LOADED).u64(engine.weight_bytes());
    message
        .u64(footprint.per_sequence)
        .u64(footprint.per_position);
    let card = engine.card().unwrap_or_default();
    message.u32(footprint.page).bytes(card.as_bytes());
    message.send(pipe)?;
    let mut served = Served::new(engine, shape);
    let mut reply = Message::default();
    let mut core = SharedCore::of_this_thread();
    loop {
        core.stay_on(SharedCore::current());
        let received = message.receive(pipe, REQUEST_LIMIT);
        core.leave();
        let (kind, fields) = match received {
            Ok(request) => request,
            Err(end) if end.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error),
        };
        let outcome = served.act(kind, fields)?;
        let kv_bytes = served.engine.kv_bytes_in_use();
        let here = SharedCore::current();
        match outcome {
            Ok(value) => {
                reply.start(DONE).u32(here).u64(kv_bytes);
                reply.u64(value).rows(&served.x);
            }
            Err(fault) => {
                reply.start(FAULT).u32(here).u64(kv_bytes);
                for span in &served.spans {
                    reply.u32(served.engine.len(span.seq));
                }
                write_fault(&fault, &mut reply);
            }
        }
        wipe(&mut served.x);
        reply.send(pipe)?;
        if served.engine.is_lost() {
            // The host starts another process, on the processor.
            return Err(io::Error::other("the graphics card was lost"));
        }
    }
}

pub(super) struct Served<E: LayerEngine> {
    engine: E,
    shape: RowShape,
    sequences: HashMap<u64, E::Seq>,
    /// Id of the next sequence.
    next: u64,
    /// Spans and rows of the last request.
    spans: Vec<Span<E::Seq>>,
    pub(super) x: Vec<f32>,
}

impl<E: LayerEngine> Served<E> {
    pub(super) fn new(engine: E, shape: RowShape) -> Self {
        Self {
            engine,
            shape,
            sequences: HashMap::new(),
            next: 0,
            spans: Vec::new(),
            x: Vec::new(),
        }
    }

    pub(super) fn act(
        &mut self,
        kind: u8,
        mut from: Fields<'_>,
    ) -> io::Result<Result<u64, StreamFault>> {
        self.spans.clear();
        self.x.clear();
        Ok(match kind {
            OPEN => self.engine.open().map(|seq| self.insert(seq)),
            FORK => {
                let (seq, length) = (self.sequence(from.u64()?)?, from.u32()?);
                self.engine.fork(seq, length).map(|seq| self.insert(seq))
            }
            CLOSE => {
                if let Some(seq) = self.sequences.remove(&from.u64()?) {
                    self.engine.close(seq);
                }
                Ok(0)
            }
            TRUNCATE => {
                let (seq, length) = (self.sequence(from.u64()?)?, from.u32()?);
                self.engine.truncate(seq, length).map(u64::from)
            }
            FORWARD => {
                let layers = (from.u32()?, from.u32()?);
                let mut rows = 0_usize;
                for _ in 0..from.u32()? {
                    let seq = self.sequence(from.u64()?)?;
                    let span = Span::new(seq, from.u32()?, from.u32()?);
                    rows = rows.saturating_add(span.rows as usize);
                    self.spans.push(span);
                }
                let values = rows.saturating_mul(values_before(layers, self.shape));
                if values != from.rest().len() / size_of::<f32>() {
                    return Err(Malformed.into());
                }
                self.x.resize(values, 0.0);
                from.rows(&mut self.x)?;
                let done = self.engine.forward(layers, &self.spans, &mut self.x);
                done.map(|()| 0)
            }
            _ => return Err(Malformed.into()),
        })
    }

    /// Id of a new sequence.
    fn insert(&mut self, seq: E::Seq) -> u64 {
        self.next += 1;
        self.sequences.insert(self.next, seq);
        self.next
    }

    fn sequence(&self, id: u64) -> io::Result<E::Seq> {
        let found = self.sequences.get(&id).copied();
        found.ok_or_else(|| Malformed.into())
    }
}
