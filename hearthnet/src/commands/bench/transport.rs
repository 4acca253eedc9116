//! Round trips and throughput of a session by size, against an echo in another process. The rows
//! are noise, like most activations: zstd cannot compress them.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearthnet_bus::{NodeId, NodeKey};
use hearthnet_orchestrator::link::HostAddr;
use hearthnet_transport::{
    Admission, CloseCode, Connection, DType, Hello, Identity, Listener, Message, SendError,
    SessionStats, Step, StepResult, Want, connect,
};
use serde::Serialize;

use crate::cli::{Failure, Kind, Stop, bytes, failure, print, print_result, runtime, table};
use crate::config::Config;

/// Purpose of the sessions.
const PURPOSE: &str = "bench";
/// Row block sizes in bytes for the round trips: a decode row of a 0.1B and of a 7B model, a
/// prefill chunk, a whole tensor chunk.
const ROUND_TRIP_BYTES: [u32; 4] = [1_152, 7_168, 294_912, 1_048_576];
/// Unmeasured round trips per size, before the measured ones.
const WARM_UP: u32 = 200;
/// Row block sizes in bytes for the throughput.
const THROUGHPUT_BYTES: [u32; 5] = [1_152, 65_536, 294_912, 1_048_576, 8_388_608];
/// Duration of each throughput measurement.
const THROUGHPUT_TIME: Duration = Duration::from_secs(1);

#[derive(Serialize)]
struct Report {
    /// Round trips of one step and its answer of the same size.
    round_trips: Vec<RoundTrips>,
    /// Steps one way, with as many in flight as the host allows.
    throughput: Vec<Throughput>,
    /// The session's counters afterwards.
    session: SessionStats,
}

/// Round trips of one size: quantiles in microseconds.
#[derive(Serialize)]
struct RoundTrips {
    /// Bytes of rows, each way.
    bytes: u32,
    /// Round trips measured.
    count: u32,
    p50_us: f64,
    p95_us: f64,
    p99_us: f64,
    min_us: f64,
}

/// Throughput at one size.
#[derive(Serialize)]
struct Throughput {
    /// Bytes of rows per step.
    bytes: u32,
    /// Steps answered.
    steps: u64,
    seconds: f64,
    /// Millions of bytes per second.
    megabytes_per_second: f64,
}

/// Serves one caller with an echo until standard input ends.
pub(super) fn echo(caller: NodeId, config: &Config) -> Result<(), Failure> {
    let key = NodeKey::generate().map_err(Failure::internal)?;
    let identity = Identity::from_secret(&key.secret()).map_err(Failure::internal)?;
    let transport = config.transport();
    runtime()?.block_on(async {
        let admission = Arc::new(OnlyCaller(caller));
        let mut listener = Listener::bind("127.0.0.1:0", &identity, admission, transport, &[])
            .await
            .map_err(|e| Failure::new(Kind::Host, e.to_string()))?;
        print(format!("{}#{}\n", listener.local_addr(), key.id()))?;
        // Standard input ends when the measuring process closes the pipe or dies.
        let stop = Stop::listen(true)?;
        loop {
            tokio::select! {
                connection = listener.session() => { tokio::spawn(serve_echo(connection)); }
                () = stop.asked() => return Ok(()),
            }
        }
    })
}

struct OnlyCaller(NodeId);

impl Admission for OnlyCaller {
    fn admit_peer(&self, peer: &NodeId) -> bool {
        *peer == self.0
    }

    fn admit_hello(&self, _: &NodeId, hello: &Hello, _: u64) -> Result<(), CloseCode> {
        if hello.purpose == PURPOSE {
            Ok(())
        } else {
            Err(CloseCode::PurposeUnknown)
        }
    }
}

/// Answers every step with the rows that it wants, until the session ends.
async fn serve_echo(mut connection: Connection) {
    let sender = connection.sender();
    while let Ok(message) = connection.recv().await {
        let Message::Step(step) = message else {
            continue;
        };
        let sent = sender.send(Message::StepResult(step.echo())).await;
        if let Err(SendError::Closed(_)) = sent {
            return;
        }
    }
}

/// Starts an echo in a process of its own, measures, and prints the report.
pub(super) fn run(rounds: u32, json: bool, config: &Config) -> Result<(), Failure> {
    let key = NodeKey::generate().map_err(Failure::internal)?;
    let fail = |e: std::io::Error| failure!(Host, "cannot start the echo: {e}");
    let program = std::env::current_exe().map_err(fail)?;
    // Dropped at the end of this function: the pipe closes and the echo ends.
    let mut child = Command::new(program)
        .args(["bench", "transport", "--echo-for", &key.id().to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(fail)?;
    let mut address = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout)
            .read_line(&mut address)
            .map_err(fail)?;
    }
    let address = address
        .trim()
        .parse::<HostAddr>()
        .map_err(|_| Failure::internal("the echo process did not start"))?;
    let identity = Identity::from_secret(&key.secret()).map_err(Failure::internal)?;
    let transport = config.transport();
    let report = runtime()?.block_on(async {
        // A separate task, because I/O on the thread of `block_on` is slow.
        let work = tokio::spawn(async move {
            let (endpoint, hello) = (&address.endpoint, Hello::new(PURPOSE, Vec::new()));
            let mut connection = connect(endpoint, &identity, address.node, hello, transport)
                .await
                .map_err(Failure::internal)?;
            measure(&mut connection, rounds).await
        });
        work.await.map_err(Failure::internal)?
    });
    drop(child.stdin.take());
    // The child ends by itself; waiting avoids a zombie.
    let _ = child.wait();
    let report = report?;
    print_result(json, &report, || report_table(&report))
}

fn report_table(report: &Report) -> String {
    let trips = report.round_trips.iter().map(|r| {
        [
            r.bytes.to_string(),
            format!("{:.1}", r.p50_us),
            format!("{:.1}", r.p95_us),
            format!("{:.1}", r.p99_us),
        ]
    });
    let speeds = report.throughput.iter().map(|t| {
        [
            bytes(u64::from(t.bytes)),
            format!("{:.0}", t.megabytes_per_second),
        ]
    });
    format!(
        "round trips between two processes on loopback, TLS 1.3 and WebSocket\n{}\none way\n{}",
        table("bytes|p50 us|p95 us|p99 us", trips),
        table("size|MB/s", speeds)
    )
}

/// Measures an open session whose host runs [`serve_echo`].
async fn measure(connection: &mut Connection, rounds: u32) -> Result<Report, Failure> {
    let mut round_trips = Vec::new();
    for bytes in ROUND_TRIP_BYTES {
        round_trips.push(round_trip(connection, bytes, rounds).await?);
    }
    let mut throughput = Vec::new();
    for bytes in THROUGHPUT_BYTES {
        throughput.push(one_way(connection, bytes).await?);
    }
    Ok(Report {
        round_trips,
        throughput,
        session: connection.stats(),
    })
}

/// A step of one row, with `bytes` bytes of noise (xorshift64*).
fn step(bytes: u32, want: Want) -> Step {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let data = (0..bytes / 2).flat_map(|_| {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        let [_, _, _, _, _, _, a, b] = state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes();
        [a, b]
    });
    Step {
        stream: 1,
        epoch: 0,
        position: 0,
        rows: 1,
        width: bytes / 2,
        dtype: DType::F16,
        want,
        data: data.collect::<Vec<u8>>().into(),
    }
}

async fn result(connection: &mut Connection) -> Result<StepResult, Failure> {
    loop {
        match connection.recv().await.map_err(Failure::internal)? {
            Message::StepResult(result) => return Ok(result),
            // The host will end the session, and answers until then.
            Message::Leaving { .. } => {}
            _ => return Err(not_an_echo("another message than a result")),
        }
    }
}

fn not_an_echo(what: &str) -> Failure {
    Failure::internal(format!("the host does not echo: {what}"))
}

async fn round_trip(
    connection: &mut Connection,
    bytes: u32,
    rounds: u32,
) -> Result<RoundTrips, Failure> {
    let sender = connection.sender();
    let step = step(bytes, Want::All);
    let mut times = Vec::with_capacity(rounds as usize);
    for round in 0..WARM_UP.saturating_add(rounds) {
        let begin = Instant::now();
        let sent = sender.send(Message::Step(step.clone())).await;
        sent.map_err(Failure::internal)?;
        let result = result(connection).await?;
        let took = begin.elapsed();
        if result.data != step.data {
            return Err(not_an_echo("other rows than were sent"));
        }
        if round >= WARM_UP {
            times.push(took.as_nanos() as f64 / 1000.0);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(RoundTrips {
        bytes,
        count: rounds,
        p50_us: quantile(&times, 0.50),
        p95_us: quantile(&times, 0.95),
        p99_us: quantile(&times, 0.99),
        min_us: quantile(&times, 0.0),
    })
}

/// Value at quantile `q` of sorted values; 0 if there are none.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    let at = (last as f64 * q).round() as usize;
    sorted.get(at).copied().unwrap_or(0.0)
}

async fn one_way(connection: &mut Connection, bytes: u32) -> Result<Throughput, Failure> {
    let sender = connection.sender();
    let step = step(bytes, Want::None);
    let begin = Instant::now();
    // A send waits for a slot, and slots are freed by answers, which must be received: so do both
    // at once. (A dropped `send` has sent nothing.)
    let (mut sent, mut answered) = (0u64, 0u64);
    while begin.elapsed() < THROUGHPUT_TIME || answered < sent {
        tokio::select! {
            biased;
            done = sender.send(Message::Step(step.clone())), if begin.elapsed() < THROUGHPUT_TIME => {
                done.map_err(Failure::internal)?;
                sent += 1;
            }
            answer = result(connection), if sent > answered => {
                answer?;
                answered += 1;
            }
        }
    }
    let seconds = begin.elapsed().as_secs_f64();
    let total = answered as f64 * f64::from(bytes);
    Ok(Throughput {
        bytes,
        steps: answered,
        seconds,
        megabytes_per_second: total / seconds / 1e6,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_sorted_values() {
        let values: Vec<f64> = (0..=100).map(f64::from).collect();
        assert_eq!(quantile(&values, 0.0), 0.0);
        assert_eq!(quantile(&values, 0.5), 50.0);
        assert_eq!(quantile(&values, 0.99), 99.0);
        assert_eq!(quantile(&values, 1.0), 100.0);
        assert_eq!(quantile(&[], 0.5), 0.0);
    }
}
