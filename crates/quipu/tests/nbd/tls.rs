//! TLS with the programs of others at the other end.

use std::fs;
use std::process::{Command, Stdio};

use super::{Folder, Program, Server, content, is_there, quipu, refused, run};

/// Certificates, in the files that nbdkit, qemu and libnbd look for.
pub(super) fn certificates(folder: &Folder) -> String {
    let at = folder.file("pki");
    fs::create_dir_all(&at).unwrap();
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes";
    let mut script = format!(
        "cd {at} && openssl req -x509 {key} -keyout ca-key.pem -out ca-cert.pem -subj /CN=authority -days 2 \
         -addext keyUsage=critical,keyCertSign"
    );
    for (name, purpose) in [("server", "serverAuth"), ("client", "clientAuth")] {
        script += &format!(
            " && openssl req {key} -keyout {name}-key.pem -out {name}.csr -subj /CN=localhost \
             && printf 'subjectAltName=DNS:localhost,IP:127.0.0.1\\nbasicConstraints=CA:FALSE\\n\
             keyUsage=digitalSignature,keyEncipherment\\nextendedKeyUsage={purpose}\\n' \
             > {name}.ext \
             && openssl x509 -req -in {name}.csr -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial \
             -extfile {name}.ext -days 2 -out {name}-cert.pem"
        );
    }
    run("sh", &["-c", &script]);
    at
}

fn with(uri: &str, pki: &str) -> String {
    format!("{uri}?tls-certificates={pki}")
}

#[test]
fn clients_of_others_use_our_server_by_tls() {
    if !is_there("openssl", "openssl") || !is_there("nbdcopy", "libnbd-bin") {
        return;
    }
    let folder = Folder::new("tls-server");
    let pki = certificates(&folder);
    let (chain, key) = (format!("{pki}/server-cert.pem"), format!("{pki}/server-key.pem"));
    let authority = format!("{pki}/ca-cert.pem");
    let tls = ["--memory", "2M", "--tls-certificate", &chain, "--tls-key", &key];
    for verify in [&[][..], &["--tls-authority", &authority]] {
        let server = Server::tcp(&[&tls, verify].concat());
        assert!(server.uri.starts_with("nbds://127.0.0.1"), "{}", server.uri);
        let (source, target) = (folder.file("source"), folder.file("target"));
        fs::write(&source, content(2 << 20)).unwrap();
        run("nbdcopy", &[&source, &with(&server.uri, &pki)]);
        quipu(&["copy", &with(&server.uri, &pki), &target]);
        assert!(fs::read(&target).unwrap() == content(2 << 20));
        if is_there("qemu-img", "qemu-utils") {
            let port = server.uri.rsplit(':').next().unwrap().trim_end_matches('/');
            let object = format!("tls-creds-x509,id=t,endpoint=client,dir={pki}");
            let image = format!("driver=nbd,host=127.0.0.1,port={port},tls-creds=t");
            run(
                "qemu-img",
                &[
                    "compare",
                    "--object",
                    &object,
                    "--image-opts",
                    &image,
                    &format!("driver=file,filename={source}"),
                ],
            );
        }
        let plain = server.uri.replace("nbds://", "nbd://");
        refused(&["info", &plain], "0x80000005");
        refused(&["info", &server.uri], "tls-certificates");
    }
}

#[test]
fn our_client_uses_servers_of_others_by_tls() {
    if !is_there("openssl", "openssl") || !is_there("nbdkit", "nbdkit") {
        return;
    }
    let folder = Folder::new("tls-client");
    let pki = certificates(&folder);
    let (socket, target) = (folder.file("socket"), folder.file("target"));
    let uri =
        format!("nbds+unix:///?socket={socket}&tls-certificates={pki}&tls-hostname=localhost");
    let command = format!("{} nbd copy '{uri}' {target}", env!("CARGO_BIN_EXE_quipu"));
    let certificates = format!("--tls-certificates={pki}");
    let require = ["--tls=require", &certificates, "--tls-verify-peer"];
    run(
        "nbdkit",
        &[&["-U", &socket][..], &require, &["pattern", "1M", "--run", &command]].concat(),
    );
    assert_eq!(fs::read(&target).unwrap()[8 * 1000 + 6..8 * 1000 + 8], 8000_u16.to_be_bytes());
    // Another authority has not signed it. nbdkit leaves its socket.
    fs::remove_file(&socket).unwrap();
    let other = Folder::new("tls-other");
    let wrong = uri.replace(&pki, &self::certificates(&other));
    let command = format!("! {} nbd info '{wrong}' 2> {target}", env!("CARGO_BIN_EXE_quipu"));
    run("nbdkit", &["-U", &socket, "--tls=require", &certificates, "null", "--run", &command]);
    let said = fs::read_to_string(&target).unwrap();
    assert!(said.contains("certificate"), "{said}");

    if is_there("qemu-nbd", "qemu-utils") {
        let (disk, socket) = (folder.file("disk"), folder.file("qemu"));
        fs::write(&disk, content(1 << 20)).unwrap();
        let object = format!("tls-creds-x509,id=t,endpoint=server,dir={pki},verify-peer=on");
        let server = Command::new("qemu-nbd")
            .args([
                "--object",
                &object,
                "--tls-creds",
                "t",
                "-f",
                "raw",
                "-t",
                "-k",
                &socket,
                &disk,
            ])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let _server = Program(server);
        let begun = std::time::Instant::now();
        while !std::path::Path::new(&socket).exists() && begun.elapsed().as_secs() < 20 {
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        let uri =
            format!("nbds+unix:///?socket={socket}&tls-certificates={pki}&tls-hostname=localhost");
        fs::remove_file(&target).unwrap();
        quipu(&["copy", &uri, &target]);
        assert!(fs::read(&target).unwrap() == content(1 << 20));
    }
}
