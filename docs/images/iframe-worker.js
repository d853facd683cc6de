// Browsers refuse workers to a page that was opened from a folder, and the site's search runs in one. There a hidden frame
// stands in for it. MkDocs' offline plugin fetches such a script from the web unless one of this name is configured.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html>";
      this.scope = new Promise((ready) => {
        frame.onload = () => {
          const scope = frame.contentWindow;
          scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const element = scope.document.createElement("script");
          element.src = script;
          element.onload = () => ready(scope);
          scope.document.head.append(element);
        };
      });
      document.documentElement.append(frame);
    }

    postMessage(data) {
      this.scope.then((scope) => scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
