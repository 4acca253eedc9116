//! The local API listens on the loopback interface, where every user of the machine can connect.
//! Without the token no call is possible, but silent connections also take slots. They must not
//! lock out the owner's programs, which connect through the socket or show the token.

use hearthnet_bus::calls::SOCKET_FILE;
use serde_json::json;
use tokio::time::timeout;

use super::prelude::*;
use crate::household::{SOON, local_api};

/// More than the limit of 32 connections.
const SILENT: usize = 40;

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<()> {
    let (folder, api) = local_api(None).await?;
    let mut silent = Vec::new();
    for door in ["socket", "port"] {
        let before = Client::connect_local(folder.path()).await?;
        for round in 1..=3 {
            for _ in 0..SILENT {
                silent.push(TcpStream::connect(api.addr()).await?);
            }
            let connected = Client::connect_local(folder.path()).await;
            let connected = connected.map_err(|error| error.to_string());
            let what = format!("{door}: a program beside {} silent ones", silent.len());
            let late = found.done(what, "accepted", connected);
            for (who, client) in [("it", late.as_ref()), ("one from before", Some(&before))] {
                let Some(client) = client else { continue };
                let call = client.call(&Capability::bus_describe(), &json!({}));
                let call = call?;
                let answered = timeout(SOON, call.result())
                    .await
                    .is_ok_and(|end| end.is_ok());
                let what = format!("{door}: {who} calls, round {round}");
                found.check(what, "answered", answered, answered);
            }
        }
        if door == "socket" {
            // Without the socket file, clients use the port.
            std::fs::remove_file(folder.path().join(SOCKET_FILE))?;
        }
    }
    api.close().await;
    Ok(())
}
