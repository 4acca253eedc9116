//! Any client that reaches the HTTP interface can open connections and send request heads very
//! slowly. Hundreds of these could use up all connections and displace the idle keep-alive
//! connections of others.

use std::time::{Duration, Instant};

use hearthnet_http::{Health, HttpServer, HttpSettings, Metrics, Part, serve_metrics};
use tokio::io::AsyncWriteExt as _;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::prelude::*;
use crate::household::{answer, connect_as_nobody, send};

/// Limit of connections with a request; the total limit is twice as high.
const CONNECTIONS: usize = 32;
/// Connections of the crowd: several times all limits.
const CROWD: usize = 300;
/// Request head deadline in the second part of the test.
const BRIEF: Duration = Duration::from_secs(1);

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<()> {
    let (_serving, health) = watch::channel(Health::Serving);
    let server = open(health.clone(), HttpSettings::default().client_deadline).await?;
    let at = server.local_addr();
    let mut kept = TcpStream::connect(at).await?;
    let served = is_served(&mut kept).await?;
    let told = "a client with a keep-alive connection";
    found.check(told, "served", served, served);
    let crowd = connect_as_nobody(at, CROWD).await?;
    let is_another = crowd.is_some();
    let mut crowd = crowd.unwrap_or_default();
    while crowd.len() < CROWD {
        crowd.push(TcpStream::connect(at).await?);
    }
    for (n, one) in crowd.iter_mut().enumerate() {
        // Connections that the server has closed in favour of others fail here.
        let _ = one.write_all(b"GET /healthz HTTP/1.1\r\nX-Slow: ").await;
        if n % 50 == 0 {
            let mut late = TcpStream::connect(at).await?;
            let served = is_served(&mut late).await?;
            let what = format!("a new client beside {CROWD} unfinished heads");
            found.check(what, "served", served, served);
        }
    }
    // If this process cannot switch to another uid, the crowd has the same user and displaces its
    // own connections.
    if is_another {
        let served = is_served(&mut kept).await?;
        let what = "the earlier client, on its keep-alive connection";
        found.check(what, "served", served, served);
    }
    drop((crowd, server));

    let server = open(health, BRIEF).await?;
    let mut slow = TcpStream::connect(server.local_addr()).await?;
    let begun = Instant::now();
    let trickle = async {
        while slow.write_all(b"X").await.is_ok() {
            sleep(BRIEF / 20).await;
        }
    };
    let ended = timeout(10 * BRIEF, trickle).await.is_ok();
    let seen = format!("after {:.1} s", begun.elapsed().as_secs_f64());
    let what = "a head that arrives byte by byte";
    found.check(what, "closed at its deadline", seen, ended);
    Ok(())
}

async fn open(health: watch::Receiver<Health>, client_deadline: Duration) -> Result<HttpServer> {
    let numbers = Metrics::install(Part::Host)?;
    let settings = HttpSettings {
        listen: "127.0.0.1:0".to_owned(),
        max_connections: CONNECTIONS,
        client_deadline,
        ..HttpSettings::default()
    };
    let server = serve_metrics(numbers, health, &settings).await;
    server.map_err(HarnessError::victim)
}

async fn is_served(stream: &mut TcpStream) -> Result<bool> {
    // The connection was closed meanwhile.
    if send(stream, "/healthz", "").await.is_err() {
        return Ok(false);
    }
    Ok(answer(stream)
        .await
        .is_some_and(|(status, _)| status == 200))
}
