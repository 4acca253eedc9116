//! Measures a session between two processes on the loopback interface:
//! `cargo run --release -p hearthnet-transport --example bench_transport`.
//!
//! The host is a second process of the same program. `--json` prints the report for machines.

#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;

use hearthnet_transport::bench::{self, BenchOptions};
use hearthnet_transport::{
    Admission, CloseCode, Config, Hello, Identity, Listener, NodeId, connect,
};

/// Admits one key, for measuring.
struct Only(NodeId);

impl Admission for Only {
    fn admit_peer(&self, key: &NodeId) -> bool {
        *key == self.0
    }

    fn admit_hello(&self, _: &NodeId, hello: &Hello, _: u64) -> Result<(), CloseCode> {
        if hello.purpose == bench::PURPOSE {
            Ok(())
        } else {
            Err(CloseCode::PurposeUnknown)
        }
    }
}

fn secret() -> [u8; 32] {
    let mut secret = [0; 32];
    getrandom::fill(&mut secret).unwrap();
    secret
}

/// The host: reads its own secret and the caller's key from stdin, prints its port, echoes.
async fn host() {
    let mut keys = [0; 64];
    std::io::stdin().read_exact(&mut keys).unwrap();
    let identity = Identity::from_secret(&keys[..32].try_into().unwrap()).unwrap();
    let caller = NodeId::from_bytes(keys[32..].try_into().unwrap()).unwrap();
    let admission = Arc::new(Only(caller));
    let mut listener = Listener::bind("127.0.0.1:0", &identity, admission, Config::default())
        .await
        .unwrap();
    println!("{}", listener.local_addr());
    bench::serve_echo(listener.accept().await).await;
}

async fn caller() {
    let (host_secret, own) = (secret(), Identity::from_secret(&secret()).unwrap());
    let host_key = Identity::from_secret(&host_secret).unwrap().key();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .arg("host")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(&host_secret).unwrap();
    stdin.write_all(own.key().as_bytes()).unwrap();
    let mut addr = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut addr)
        .unwrap();

    let hello = Hello::new(bench::PURPOSE, Vec::new());
    let config = Config::default();
    let mut connection = connect(addr.trim(), &own, host_key, hello, config)
        .await
        .unwrap();
    let report = bench::run(&mut connection, &BenchOptions::default())
        .await
        .unwrap();
    drop(connection);
    child.wait().unwrap();

    if std::env::args().any(|arg| arg == "--json") {
        println!("{}", serde_json::to_string_pretty(&report).unwrap());
        return;
    }
    println!(
        "{:>10} {:>9} {:>9} {:>9} {:>9}   round trip, µs",
        "bytes", "p50", "p95", "p99", "min"
    );
    for r in &report.round_trips {
        println!(
            "{:>10} {:>9.1} {:>9.1} {:>9.1} {:>9.1}",
            r.bytes, r.p50_us, r.p95_us, r.p99_us, r.min_us
        );
    }
    println!("{:>10} {:>9} {:>9}   one way", "bytes", "MB/s", "steps");
    for t in &report.throughput {
        println!(
            "{:>10} {:>9.0} {:>9}",
            t.bytes, t.megabytes_per_second, t.steps
        );
    }
}

#[tokio::main]
async fn main() {
    // On a worker, where the I/O is: `block_on` itself would cost a thread switch per message.
    let work = match std::env::args().nth(1).as_deref() {
        Some("host") => tokio::spawn(host()),
        _ => tokio::spawn(caller()),
    };
    work.await.unwrap();
}
