//! A web page whose host name resolves to this machine can call the HTTP interface, because the
//! browser takes it for the page's server (DNS rebinding). Only the host name in the request tells
//! the two apart. A name that merely looks like this machine's must be refused at every path, and
//! must learn nothing from the one path that is open to all.

use std::net::SocketAddr;

use hearthnet_http::{Health, HttpSettings, Metrics, Part, serve_metrics};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::watch;

use super::prelude::*;

/// Names that resolve to this machine, or that a lenient parser takes for its name.
const PRETENDERS: [&str; 10] = [
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "[::1]evil.example",
    "[::1].evil.example:80",
    "[::1]:80:evil.example",
    "localhost:80@evil.example",
    "evil.example@localhost",
    "localhost:evil.example",
    "0.0.0.0",
];

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<()> {
    let numbers = Metrics::install(Part::Host)?;
    let (_serving, health) = watch::channel(Health::Serving);
    let settings = HttpSettings {
        listen: "127.0.0.1:0".to_owned(),
        ..HttpSettings::default()
    };
    let server = serve_metrics(numbers, health, &settings).await?;
    let at = server.local_addr();
    let honest = ask(at, "/metrics", &format!("Host: {at}")).await?;
    found.same("a request that names this machine", "200", status(&honest));
    for name in PRETENDERS {
        // An absolute URI in the request line takes precedence over the Host header.
        let absolute = format!("http://{name}/metrics");
        for (how, target, host) in [
            ("Host", "/metrics", name),
            ("the request line", &absolute, "localhost"),
        ] {
            let answer = ask(at, target, &format!("Host: {host}")).await?;
            // A malformed target is refused as a bad request.
            let refused = ["403", "400"].contains(&status(&answer));
            let told = answer.contains("hearthnet_");
            let seen = format!("{}, metrics: {told}", status(&answer));
            let expected = "403 or 400, and no metrics";
            found.check(format!("{name} in {how}"), expected, seen, refused && !told);
        }
    }
    let twice = ask(at, "/metrics", "Host: localhost\r\nHost: evil.example").await?;
    let what = "two names";
    found.check(what, "not 200", status(&twice), status(&twice) != "200");
    let well = ask(at, "/healthz", "Host: evil.example").await?;
    let word = well.rsplit("\r\n").next().unwrap_or_default();
    found.same("the answer of the public path", "{\"status\":\"ok\"}", word);
    server.shutdown(std::time::Duration::from_secs(1)).await;
    Ok(())
}

/// Complete response to a request with these headers.
async fn ask(at: SocketAddr, target: &str, headers: &str) -> Result<String> {
    let mut stream = TcpStream::connect(at).await?;
    let request = format!("GET {target} HTTP/1.1\r\n{headers}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

fn status(answer: &str) -> &str {
    answer.split(' ').nth(1).unwrap_or("none")
}
