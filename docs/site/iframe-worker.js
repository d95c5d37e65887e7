// Search in a site that is opened from a directory: browsers start no worker from a file, so it runs in a frame.
// MkDocs Material's offline plugin would fetch its own script for this from a network.
if (location.protocol === "file:") {
  const inside = `
    self.postMessage = message => parent.postMessage(message, "*");
    self.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise(resolve => {
      const script = document.createElement("script");
      script.src = url;
      script.onload = resolve;
      document.body.appendChild(script);
    })), Promise.resolve());`;
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.loaded = new Promise(resolve => { frame.onload = resolve; });
      frame.srcdoc = `<body><script>${inside}</script><script src="${new URL(url, location)}"></script></body>`;
      window.addEventListener("message", event => {
        if (event.source !== frame.contentWindow) return;
        const message = new MessageEvent("message", {data: event.data});
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      });
      document.body.appendChild(frame);
      this.frame = frame;
    }
    postMessage(message) {
      // The frame's own postMessage is the worker's, which leads here.
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data: message})));
    }
    terminate() { this.frame.remove(); }
  };
}
