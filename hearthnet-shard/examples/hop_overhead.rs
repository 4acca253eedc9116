//! Measures what a host adds to a decode step beyond the engine's compute: the round trip of one
//! row over loopback TLS, through admission, queue and scheduler, with an engine that computes
//! nothing.
//!
//! ```text
//! cargo run --release -p hearthnet-shard --example hop_overhead [WIDTH] [STEPS]
//! ```
//!
//! Prints microseconds: p50, p95, p99 of the pipeline, and of the bare echo of the same row.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing
)]

use std::time::Instant;

use bytes::Bytes;
use hearthnet_bus::{Grant, NodeKey};
use hearthnet_files::BoundaryDtype;
use hearthnet_files::spec::RowShape;
use hearthnet_shard::{
    BENCH, EngineSource, Footprint, LayerEngine, LoadFault, PIPELINE, RunningHost, ServeConfig,
    Served, ShardHost, Span, StartProgress, StreamFault,
};
use hearthnet_transport::{
    Config, Connection, DType, Hello, Message, Step, StreamOpen, Want, connect,
};

/// Engine that counts positions and leaves the rows unchanged.
#[derive(Default)]
struct Nothing(Vec<u32>);

impl LayerEngine for Nothing {
    type Seq = usize;

    fn open(&mut self) -> Result<usize, StreamFault> {
        self.0.push(0);
        Ok(self.0.len() - 1)
    }

    fn fork(&mut self, _seq: usize, length: u32) -> Result<usize, StreamFault> {
        self.0.push(length);
        Ok(self.0.len() - 1)
    }

    fn close(&mut self, seq: usize) {
        self.0[seq] = 0;
    }

    fn len(&self, seq: usize) -> u32 {
        self.0[seq]
    }

    fn truncate(&mut self, seq: usize, length: u32) -> Result<u32, StreamFault> {
        self.0[seq] = length;
        Ok(length)
    }

    fn forward(
        &mut self,
        _layers: (u32, u32),
        spans: &[Span<usize>],
        _x: &mut [f32],
    ) -> Result<(), StreamFault> {
        spans.iter().for_each(|span| self.0[span.seq] += span.rows);
        Ok(())
    }

    fn weight_bytes(&self) -> u64 {
        0
    }

    fn footprint(&self) -> Footprint {
        Footprint {
            per_sequence: 0,
            per_position: 0,
            page: 1,
        }
    }

    fn kv_bytes_in_use(&self) -> u64 {
        0
    }
}

struct Source;

impl EngineSource for Source {
    type Engine = Nothing;

    fn load(&mut self, _: &mut dyn FnMut(StartProgress)) -> Result<Nothing, LoadFault> {
        Ok(Nothing::default())
    }
}

async fn session(host: &RunningHost, key: &NodeKey, purpose: &str) -> Connection {
    let grant = Grant::of_session(key.id(), key.id(), host.node_id(), 60).unwrap();
    let hello = Hello::new(purpose, grant.sign(key).unwrap());
    let (addr, identity) = (host.local_addr().to_string(), key.identity().unwrap());
    connect(&addr, &identity, host.node_id(), hello, Config::default())
        .await
        .unwrap()
}

async fn measure(connection: &mut Connection, width: u32, steps: u32) -> Vec<u64> {
    let open = StreamOpen {
        stream: 1,
        epoch: 1,
        weights: [0; 32],
        lo: 0,
        hi: 0,
        max_positions: steps,
        fork: None,
    };
    connection
        .sender()
        .send(Message::StreamOpen(open))
        .await
        .unwrap();
    connection.recv().await.unwrap();
    let data = Bytes::from(vec![0x11; width as usize * 2]);
    let mut times = Vec::with_capacity(steps as usize);
    for position in 0..steps {
        let step = Step {
            stream: 1,
            epoch: 1,
            position,
            rows: 1,
            width,
            dtype: DType::F16,
            want: Want::Last,
            data: data.clone(),
        };
        let began = Instant::now();
        connection.sender().send(Message::Step(step)).await.unwrap();
        match connection.recv().await.unwrap() {
            Message::StepResult(_) => times.push(began.elapsed().as_micros() as u64),
            other => panic!("{other:?}"),
        }
    }
    times.sort_unstable();
    times
}

fn print(name: &str, times: &[u64]) {
    let at = |part: usize| times[(times.len() - 1) * part / 100];
    println!(
        "{name:<10} p50 {:>5}  p95 {:>5}  p99 {:>5} µs",
        at(50),
        at(95),
        at(99)
    );
}

fn main() {
    let mut numbers = std::env::args()
        .skip(1)
        .map(|text| text.parse::<u32>().unwrap());
    let (width, steps) = (
        numbers.next().unwrap_or(576),
        numbers.next().unwrap_or(20_000),
    );
    // The host has its own runtime, as in a process of its own.
    let runtime = || {
        tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .unwrap()
    };
    let (server, client) = (runtime(), runtime());
    let (host_key, key) = (NodeKey::generate().unwrap(), NodeKey::generate().unwrap());
    let mut config = ServeConfig::new("127.0.0.1:0");
    config.admitted = vec![key.id()];
    let served = Served {
        model_id: "nothing".into(),
        weights: [0; 32],
        lo: 0,
        hi: 0,
        total_layers: 1,
        rows: RowShape::plain(width),
        boundary: BoundaryDtype::F16,
        context: steps,
        arithmetic: "none".into(),
    };
    let host = server
        .block_on(ShardHost::start_on(
            config,
            &host_key,
            served,
            Source,
            &mut |_| {},
        ))
        .unwrap();
    let work = async move {
        for round in 1..=3 {
            println!("round {round}, width {width}, {steps} steps");
            let mut pipeline = session(&host, &key, PIPELINE).await;
            print("pipeline", &measure(&mut pipeline, width, steps).await);
            let mut bench = session(&host, &key, BENCH).await;
            print("echo", &measure(&mut bench, width, steps).await);
        }
    };
    // On a worker thread: in the body of `block_on` each step costs more.
    client.block_on(async { tokio::spawn(work).await }).unwrap();
}
