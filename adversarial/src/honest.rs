//! Honest caller: runs small steps all the time with the real client. Its answers must stay
//! bit-identical during an attack; the latency of its steps is measured.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hearthnet_bus::NodeKey;
use hearthnet_transport::{
    CloseCode, Config, Connection, DType, Hello, Message, Step, StreamClose, StreamOpen, Want,
    connect,
};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::target::Target;
use crate::{HarnessError, Result};

/// Positions per round. Going back to position 0 makes the host discard the later ones, so every
/// round must give the same answers.
const POSITIONS: u32 = 16;

/// Time limit of an answer; a later answer counts as a lost connection.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Answers of one round.
pub(crate) type Answers = Arc<Vec<Bytes>>;

#[derive(Debug)]
pub(crate) struct Honest {
    answers: Answers,
    samples: Arc<Mutex<Vec<Duration>>>,
    steps: watch::Receiver<u64>,
    stop: watch::Sender<bool>,
    task: JoinHandle<Result<(), String>>,
}

impl Honest {
    /// Connects and runs one round. If `expected` is given, the answers must equal it.
    ///
    /// # Errors
    /// A sentence that describes the failure of the host.
    pub(crate) async fn begin(
        target: &Target,
        key: &NodeKey,
        expected: Option<&Answers>,
    ) -> Result<Honest> {
        let mut call = Call::open(target, key, POSITIONS).await?;
        let mut answers = Vec::new();
        for position in 0..POSITIONS {
            answers.push(call.step(1, position).await.map_err(HarnessError::Honest)?);
        }
        if expected.is_some_and(|expected| **expected != answers) {
            return Err(HarnessError::honest("its answers differ from before"));
        }
        let answers = Arc::new(answers);
        let samples = Arc::new(Mutex::new(Vec::new()));
        let (count, steps) = watch::channel(0);
        let (stop, stopped) = watch::channel(false);
        let (known, taken) = (Arc::clone(&answers), Arc::clone(&samples));
        let task = tokio::spawn(async move {
            while !*stopped.borrow() {
                for (position, expected) in (0..POSITIONS).zip(known.iter()) {
                    let begin = Instant::now();
                    let answer = call.step(1, position).await?;
                    taken.lock().push(begin.elapsed());
                    count.send_modify(|count| *count += 1);
                    if answer != *expected {
                        return Err(format!("the answer at position {position} has changed"));
                    }
                }
            }
            call.close().await
        });
        Ok(Honest {
            answers,
            samples,
            steps,
            stop,
            task,
        })
    }

    pub(crate) fn answers(&self) -> Answers {
        Arc::clone(&self.answers)
    }

    /// Durations of the steps since the last call.
    pub(crate) fn take_samples(&self) -> Vec<Duration> {
        std::mem::take(&mut *self.samples.lock())
    }

    /// Number of samples so far.
    pub(crate) fn samples(&self) -> usize {
        self.samples.lock().len()
    }

    /// Waits for `more` further steps, or until the caller has been cut off.
    pub(crate) async fn steps(&mut self, more: u64) {
        let until = *self.steps.borrow() + more;
        // An error means that the caller has ended; `end` returns the reason.
        let _ = self.steps.wait_for(|&steps| steps >= until).await;
    }

    /// Stops and closes the session.
    ///
    /// # Errors
    /// The failure of the host, now or earlier.
    pub(crate) async fn end(self) -> Result<(), String> {
        self.stop.send_replace(true);
        match self.task.await {
            Ok(result) => result,
            Err(error) => Err(format!("the caller failed: {error}")),
        }
    }
}

/// Connection with stream 1 open, made with the real client.
pub(crate) struct Call {
    connection: Connection,
    target: Target,
}

impl Call {
    /// Connects and opens a stream for `positions` positions.
    ///
    /// # Errors
    /// If the host refuses it.
    pub(crate) async fn open(target: &Target, key: &NodeKey, positions: u32) -> Result<Call> {
        let identity = key.identity()?;
        let hello = Hello::new("pipeline", target.token(key).await?);
        let addr = target.addr.to_string();
        // A receipt is not the answer to a message.
        let config = Config {
            receipts: 0,
            ..Config::default()
        };
        let mut call = Call {
            connection: connect(&addr, &identity, target.node, hello, config).await?,
            target: *target,
        };
        let opened = call.stream(1, positions).await;
        opened.map_err(HarnessError::Honest)?;
        Ok(call)
    }

    /// Opens a stream.
    ///
    /// # Errors
    /// `stream error CODE` if the host refuses the stream, or a sentence for any other failure.
    pub(crate) async fn stream(&mut self, stream: u32, positions: u32) -> Result<(), String> {
        let (lo, hi) = self.target.layers;
        let open = StreamOpen {
            stream,
            epoch: 1,
            weights: self.target.weights,
            lo,
            hi,
            max_positions: positions,
            fork: None,
        };
        match self.ask(Message::StreamOpen(open)).await? {
            Message::StreamOpened(_) => Ok(()),
            other => Err(refusal(&other)),
        }
    }

    async fn ask(&mut self, message: Message) -> Result<Message, String> {
        let work = async {
            let sent = self.connection.sender().send(message).await;
            sent.map_err(|error| error.to_string())?;
            let received = self.connection.recv().await;
            received.map_err(|error| error.to_string())
        };
        timeout(TIMEOUT, work)
            .await
            .map_err(|_| "the host does not answer".to_owned())?
    }

    /// Runs the step at a position. Rows are a function of the position, so every conversation is
    /// the same.
    ///
    /// # Errors
    /// `stream error CODE` if the host ends the stream, or a sentence for any other failure.
    pub(crate) async fn step(&mut self, stream: u32, position: u32) -> Result<Bytes, String> {
        // fp16 values in [0.5, 1), different at each position.
        let value = |column: u32| 0x3800 + ((position * 131 + column * 37) % 0x400) as u16;
        let width = self.target.width;
        let data = (0..width).flat_map(|column| value(column).to_le_bytes());
        let step = Step {
            stream,
            epoch: 1,
            position,
            rows: 1,
            width,
            dtype: DType::F16,
            want: Want::All,
            data: data.collect(),
        };
        match self.ask(Message::Step(step)).await? {
            Message::StepResult(result) if result.position == position => Ok(result.data),
            other => Err(refusal(&other)),
        }
    }

    /// Closes the session.
    ///
    /// # Errors
    /// If the session has ended already.
    pub(crate) async fn close(mut self) -> Result<(), String> {
        let close = StreamClose {
            stream: 1,
            epoch: 1,
        };
        let sent = self
            .connection
            .sender()
            .send(Message::StreamClose(close))
            .await;
        sent.map_err(|error| error.to_string())?;
        self.connection.close(CloseCode::Normal);
        // Returns once the close of this side has been sent.
        let _ = self.connection.recv().await;
        Ok(())
    }
}

fn refusal(answer: &Message) -> String {
    match answer {
        Message::StreamError(error) => format!("stream error {}", error.code),
        other => format!("not the answer: {other:?}"),
    }
}
