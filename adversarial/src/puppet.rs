//! Host that answers as the script of an attack says.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::{SinkExt as _, StreamExt as _};
use hearthnet_bus::{Descriptor, NodeKey};
use hearthnet_engine::{Engine, SeqId, Span};
use hearthnet_files::{BoundaryDtype, ModelFile};
use hearthnet_orchestrator::link::HostAddr;
use hearthnet_testkit::one_thread;
use hearthnet_transport::{
    DType, Message, Step, StepResult, StreamClose, StreamOpen, StreamOpened, Want,
};
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_tungstenite::accept_async;
use tokio_tungstenite::tungstenite::Message as WebSocketMessage;

use crate::raw::{Arrived, Credentials, Frame, acceptor, cbor, dtype, kind, life};
use crate::{HarnessError, Result};

/// Returns the answers of the host to a message.
pub(crate) type Script = Box<dyn FnMut(Message) -> Vec<Message> + Send>;

/// Scripted host, with one script for all of its sessions. It writes raw frames, so it can also send
/// messages which the transport's own session would drop, such as answers to no request. Stops when
/// dropped.
#[derive(Debug)]
pub(crate) struct Puppet {
    pub(crate) addr: HostAddr,
    /// Streams that callers have opened.
    streams: Arc<AtomicU64>,
    _serving: JoinSet<()>,
}

impl Puppet {
    /// Starts listening; every caller is accepted.
    pub(crate) async fn start(key: &NodeKey, script: Script) -> Result<Puppet> {
        let acceptor = acceptor(&Credentials::of(&key.secret()))?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let addr = HostAddr {
            endpoint: listener.local_addr()?.to_string(),
            node: key.id(),
        };
        let (streams, script) = (Arc::new(AtomicU64::new(0)), Arc::new(Mutex::new(script)));
        let (counted, mut serving) = (Arc::clone(&streams), JoinSet::new());
        serving.spawn(async move {
            let mut sessions = JoinSet::new();
            while let Ok((came, _)) = listener.accept().await {
                let (script, counted) = (Arc::clone(&script), Arc::clone(&counted));
                sessions.spawn(serve(came, acceptor.clone(), script, counted));
            }
        });
        Ok(Puppet {
            addr,
            streams,
            _serving: serving,
        })
    }

    /// Streams that callers have opened so far.
    pub(crate) fn streams(&self) -> u64 {
        self.streams.load(Ordering::Relaxed)
    }
}

async fn serve(
    came: TcpStream,
    acceptor: TlsAcceptor,
    script: Arc<Mutex<Script>>,
    streams: Arc<AtomicU64>,
) {
    let Ok(stream) = acceptor.accept(came).await else {
        return;
    };
    let Ok(mut socket) = accept_async(stream).await else {
        return;
    };
    let mut sequence = 0;
    while let Some(Ok(message)) = socket.next().await {
        let bytes = message.into_data();
        let frames = match bytes.get(1).copied() {
            Some(kind::HELLO) => vec![Frame::new(kind::HELLO, cbor(&[("version", 1.into())]))],
            Some(kind::PING) => {
                let body = bytes.get(16..).unwrap_or_default();
                vec![Frame::new(kind::PONG, body)]
            }
            _ => {
                let message = read(&bytes);
                if matches!(message, Some(Message::StreamOpen(_))) {
                    streams.fetch_add(1, Ordering::Relaxed);
                }
                let answers = message.map(|message| (*script.lock())(message));
                let answers = answers.into_iter().flatten();
                answers.filter_map(|answer| frame(&answer)).collect()
            }
        };
        for frame in frames {
            sequence += 1;
            let bytes = frame.encode(sequence);
            if socket.send(WebSocketMessage::binary(bytes)).await.is_err() {
                return;
            }
        }
    }
}

/// Message of a caller, if scripts need its kind.
fn read(bytes: &[u8]) -> Option<Message> {
    let (kind, body) = (bytes.get(1).copied()?, bytes.get(16..)?);
    let frame = Arrived::Frame {
        kind,
        body: body.to_vec(),
    };
    let number = |key| frame.number(key);
    Some(match kind {
        kind::DESCRIBE => Message::Describe,
        kind::STREAM_OPEN => Message::StreamOpen(StreamOpen {
            stream: number("stream")?,
            epoch: number("epoch")?,
            weights: [0; 32],
            lo: number("lo")?,
            hi: number("hi")?,
            max_positions: number("max_positions")?,
            fork: None,
        }),
        kind::STREAM_CLOSE => Message::StreamClose(StreamClose {
            stream: number("stream")?,
            epoch: number("epoch")?,
        }),
        kind::STEP => {
            let field = |at: usize| {
                let bytes = body.get(at * 4..)?.first_chunk()?;
                Some(u32::from_be_bytes(*bytes))
            };
            Message::Step(Step {
                stream: field(0)?,
                epoch: field(1)?,
                position: field(2)?,
                rows: field(3)?,
                width: field(4)?,
                dtype: DType::F16,
                want: match body.get(21)? {
                    0 => Want::None,
                    1 => Want::Last,
                    _ => Want::All,
                },
                data: body.get(32..)?.to_vec().into(),
            })
        }
        _ => return None,
    })
}

/// Raw frame of a host's message.
fn frame(message: &Message) -> Option<Frame> {
    Some(match message {
        Message::Descriptor(bytes) => Frame::new(kind::DESCRIPTOR, bytes.to_vec()),
        Message::StreamOpened(life_of) => {
            Frame::new(kind::STREAM_OPENED, life(life_of.stream, life_of.epoch))
        }
        Message::StepResult(result) => {
            let mut body = Vec::new();
            for field in [
                result.stream,
                result.epoch,
                result.position,
                result.rows,
                // A result without rows may have any width.
                result.width.max(1),
            ] {
                body.extend_from_slice(&field.to_be_bytes());
            }
            body.extend_from_slice(&[dtype::F16, 0, 0, 0, 0, 0, 0, 0]);
            for field in [result.compute_us, result.queue_us, 0] {
                body.extend_from_slice(&field.to_be_bytes());
            }
            body.extend_from_slice(&result.data);
            Frame::new(kind::STEP_RESULT, body)
        }
        _ => return None,
    })
}

/// All layers of a model, computed as an honest host does, for scripts that change few answers.
pub(crate) struct Layers {
    engine: Engine,
    boundary: BoundaryDtype,
    descriptor: Descriptor,
    /// Sequences by the caller's stream number.
    streams: HashMap<u32, SeqId>,
}

impl Layers {
    /// Layers of a model, for a host with this descriptor.
    pub(crate) fn load(file: &ModelFile, descriptor: Descriptor) -> Result<Layers> {
        let spec = file.spec();
        Ok(Layers {
            engine: Engine::load(file, 0..spec.layers, &one_thread(), &mut |_, _| {})?,
            boundary: spec.boundary,
            descriptor,
            streams: HashMap::new(),
        })
    }

    /// Answers as an honest host does. Errors are those of the engine.
    pub(crate) fn answer(&mut self, message: Message) -> Result<Option<Message>> {
        Ok(match message {
            Message::Describe => Some(Message::Descriptor(self.descriptor.to_cbor()?.into())),
            Message::StreamOpen(open) => {
                if !self.streams.contains_key(&open.stream) {
                    self.streams.insert(open.stream, self.engine.open()?);
                }
                let (stream, epoch) = (open.stream, open.epoch);
                Some(Message::StreamOpened(StreamOpened { stream, epoch }))
            }
            Message::StreamClose(close) => {
                if let Some(seq) = self.streams.remove(&close.stream) {
                    self.engine.close(seq);
                }
                None
            }
            Message::Step(step) => Some(Message::StepResult(self.compute(&step)?)),
            _ => None,
        })
    }

    fn compute(&mut self, step: &Step) -> Result<StepResult> {
        let unknown = || HarnessError::attacker("a step on a stream that is not open");
        let seq = *self.streams.get(&step.stream).ok_or_else(unknown)?;
        self.engine.truncate(seq, step.position)?;
        let mut values = Vec::new();
        self.boundary.decode(&step.data, &mut values)?;
        let span = Span::new(seq, step.position, step.rows);
        self.engine.forward(&[span], &mut values)?;
        let rows = match step.want {
            Want::None => 0,
            Want::Last => 1,
            Want::All => step.rows,
        };
        let mut data = Vec::new();
        let wanted = rows as usize * step.width as usize;
        let rest = values.len().saturating_sub(wanted);
        self.boundary
            .encode(values.get(rest..).unwrap_or_default(), &mut data);
        Ok(StepResult {
            stream: step.stream,
            epoch: step.epoch,
            position: step.position,
            rows,
            width: step.width,
            dtype: step.dtype,
            compute_us: 1,
            queue_us: 0,
            data: data.into(),
        })
    }
}
