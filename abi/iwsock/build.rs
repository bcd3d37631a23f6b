//! Names the library: programs that are linked with it ask for `libiwsock.so.1`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libiwsock.so.1");
}
